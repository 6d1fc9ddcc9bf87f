"""What a node shows while it runs and afterwards: its progress, and a line of text."""

import logging
from collections.abc import Callable

log = logging.getLogger("native_int8.status")


class Line:
    """The line of text on the node with id `node_id`, and what is to be said after it later on."""

    def __init__(self, node_id: str | None):
        self._node_id, self._line = node_id, ""

    def show(self, line: str) -> None:
        """Write `line` on the node, and to the log."""
        self._line = line
        show(line, self._node_id)

    def add(self, sentence: str) -> None:
        """Write `sentence` behind the line, in place of an earlier one."""
        show(f"{self._line}. {sentence}" if self._line else sentence, self._node_id)


def show(line: str, node_id: str | None) -> None:
    """Write `line` on the node with id `node_id`, and to the log."""
    from server import PromptServer

    log.info(line)
    server = getattr(PromptServer, "instance", None)
    # outside a running server, such as in a script, there is no node to write on
    if server is not None and node_id is not None:
        server.send_progress_text(line, node_id)


def progress() -> Callable[[float], None]:
    """A progress bar on the node that runs: called with the part that is done, 0 to 1.

    Raises (when called):
        InterruptProcessingException: the user stopped the run.
    """
    from comfy import model_management
    from comfy.utils import ProgressBar

    bar = ProgressBar(1000)

    def update(done: float) -> None:
        bar.update_absolute(round(1000 * done))
        model_management.throw_exception_if_processing_interrupted()

    return update
