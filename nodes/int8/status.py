"""The line of text that a node shows."""

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
