"""What a user sees while a node works: the progress bar and the line of text on the node."""

import logging

log = logging.getLogger("native_int8.status")


def show(line: str, node_id: str | None) -> None:
    """Write `line` on the node with id `node_id`, and to the log."""
    from server import PromptServer

    log.info(line)
    server = getattr(PromptServer, "instance", None)
    # outside a running server, such as in a script, there is no node to write on
    if server is not None and node_id is not None:
        server.send_progress_text(line, node_id)


def progress():
    """A function (done, total) that moves the running node's progress bar and stops when the user interrupts."""
    import comfy.model_management
    import comfy.utils

    bar = None

    def step(done: int, total: int) -> None:
        nonlocal bar
        comfy.model_management.throw_exception_if_processing_interrupted()
        bar = bar or comfy.utils.ProgressBar(total)
        bar.update_absolute(done, total)

    return step
