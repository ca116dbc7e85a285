"""Let the stream of whoever calls backward wait for the gradients.

    with torch.cuda.stream(side):     y = model(x)      # backward of these ops runs on `side`
    y.backward()                                        # the caller's stream waits for `side` when it returns
    optimizer.step()                                    # reads gradients that are complete

autograd does so for gradients that it accumulates itself. A step writes them, and would be missed.
"""

from __future__ import annotations

from typing import Any

import torch


def wait_at_end(device: torch.device, cuda: Any = torch.cuda) -> None:
    """Let the caller's stream wait, at the end of the running backward, for what this stream has been asked to do.

    `cuda` is torch.cuda, or a stand-in with its streams and events.
    """
    if device.type != "cuda":
        return
    done = cuda.Event()
    done.record(cuda.current_stream(device))

    def wait() -> None:  # called with the caller's streams as the current ones
        cuda.current_stream(device).wait_event(done)

    torch.autograd.Variable._execution_engine.queue_callback(wait)
