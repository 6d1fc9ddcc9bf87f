"""CUDA graphs where there is no GPU: "recording" keeps the function, and "replaying" calls it again."""

from native_int8.nodes.int8.graph_recorder import Recording

HELD = 3 << 20


class PretendRecorder:
    """Does what `graph_recorder.Recorder` does, on any device; `failure` is raised in place of recording."""

    failure: BaseException | None = None
    # waiting for this one counts; nothing is on a GPU here
    device_type = "cuda"

    def __init__(self):
        self.recorded, self.freed = 0, 0

    @staticmethod
    def why_not(device):
        """Everything can be recorded."""
        return None

    def record(self, call, device):
        """Run `call`; each replay writes into the same output, as a graph does."""
        output = call()
        if self.failure is not None:
            raise self.failure
        self.recorded += 1
        return Recording(lambda: output.copy_(call()), output, HELD)

    def forget(self):
        """Nothing is shared."""

    def free(self):
        """Count."""
        self.freed += 1
