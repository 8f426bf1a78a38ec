"""Answers what Megatron-Core asks of CUDA when the device is a CPU, and nothing else.

Megatron-Core 0.19 names `torch.cuda` and the device "cuda" literally. `install` makes those calls
mean the CPU, so that the same Megatron classes run over gloo. It is called once by
`groups.init_distributed` when parallel.device is cpu; with cuda this module is never imported.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.transformer.moe import token_dispatcher
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def install() -> None:
    """Redirect this process's CUDA calls to the CPU, for as long as it lives.

    Mutates: attributes of `torch.cuda`, and one of Megatron's token dispatcher; enters a global
        TorchFunctionMode. Idempotent.
    """
    if torch.cuda.current_device is _current_device:
        return
    _MODE.__enter__()
    torch.cuda.current_device = _current_device
    # Each name gets a function of its own: torch.compile, which decorates some of Megatron's
    # functions, keeps a table of torch's functions and refuses one that stands there twice.
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    for name in ("current_stream", "default_stream"):
        setattr(torch.cuda, name, lambda device=None: _IdleStream())
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.Stream = torch.cuda.Event = _IdleStream
    token_dispatcher.maybe_move_tensor_to_cpu = _read_splits
    # The generator behind Megatron's tensor-parallel seeds is the CPU's.
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda device=None: torch.get_rng_state()
        module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Let the block's code name the device "cuda" and mean it, as in any other process.

    What `torch.cuda` answers stays redirected. The block must be in the thread of `install`.
    """
    _MODE.__exit__(None, None, None)
    try:
        yield
    finally:
        _MODE.__enter__()


def _read_splits(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """What Megatron's `maybe_move_tensor_to_cpu` does for a CUDA tensor; a CPU's it leaves as it
    is, though the exchange of tokens between experts takes no tensor as its splits."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites device arguments, `.cuda()` and the CUDA names of tensor types."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The distributed optimizer sorts its parameters by "torch.cuda.FloatTensor" and such.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


_MODE = _CudaMeansCpu()


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _current_device() -> torch.device:
    return _CPU


class _IdleStream:
    """A stream or an event. Work on a CPU is done when the call returns."""

    def wait_stream(self, stream: Any) -> None:
        """There is nothing to wait for."""

    wait_event = wait_stream

    def record_event(self) -> "_IdleStream":
        """What is recorded has happened."""
        return self

    def synchronize(self) -> None:
        """There is nothing to wait for."""
