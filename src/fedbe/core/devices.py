"""Which devices there are, and how numbers get onto one.

Everything works on any device that torch knows. CUDA and MPS are named here only where they differ from the others.
"""

import os

import torch
from torch import Tensor

from fedbe.errors import SettingError

CPU = torch.device("cpu")
ACCELERATORS = ("cuda", "xpu", "mps")  # what "auto" looks for, in this order
FORMS = "auto, cpu, cuda, cuda:1, cuda:0,1 or mps"
FULL_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory")  # CUDA and MPS; cuBLAS and cuDNN; the CPU
WORKERS_PER_DEVICE = 4  # a process waits for its own kernel launches, and costs about half a gigabyte of the device


def resolve_device(text: str) -> str:
    """The device, or devices, that a name means on this machine.

    Args:
        text: "auto" (the first accelerator that torch sees, otherwise the CPU), "cpu", "cuda", "cuda:1", "cuda:0,1" …

    Returns:
        The name with numbers, such as "cpu", "cuda:0", "cuda:0,1" or "mps".

    Raises:
        SettingError: There is no such kind of device, or no such device here.

    Example:
        >>> resolve_device("cpu")
        'cpu'
    """
    if not isinstance(text, str):
        raise SettingError(f"`device` must be a text ({FORMS}), got {text!r}")
    if text == "auto":
        return next((_numbered(kind) for kind in ACCELERATORS if count_devices(kind)), "cpu")
    devices = parse_devices(text)
    kind, count = devices[0].type, count_devices(devices[0].type)
    if not count:
        raise SettingError(f"torch {torch.__version__} sees no {kind} device on this machine: use cpu, or auto")
    if missing := [device for device in devices if (device.index or 0) >= count]:
        raise SettingError(f"there is no {missing[0]} on this machine: torch sees {', '.join(list_devices(kind))}")
    return _numbered(kind) if text == kind else text


def parse_devices(text: str) -> tuple[torch.device, ...]:
    """The devices that a name lists: "cuda:0,1" are two. They need not exist.

    Raises:
        SettingError: The name has another form, or a device is listed twice.

    Example:
        >>> parse_devices("cuda:0,2")
        (device(type='cuda', index=0), device(type='cuda', index=2))
    """
    kind, colon, numbers = text.partition(":")
    parts = numbers.split(",") if colon else [""]
    try:
        if colon and (kind == "cpu" or not all(part.isdecimal() for part in parts)):
            raise ValueError
        devices = tuple(torch.device(f"{kind}:{int(part)}" if part else kind) for part in parts)
    except (ValueError, RuntimeError):
        raise SettingError(f"unknown device '{text}': use {FORMS}") from None
    if len(set(devices)) < len(devices):
        raise SettingError(f"the device '{text}' lists a number twice")
    return devices


def device_of_worker(text: str, number: int) -> str:
    """The device of one of several workers, called where the worker is: they take the devices in turn that are there.

    A worker of a cluster may see other devices than the process that read the name: of "cuda:0,1", a worker for which
    one GPU is reserved sees this one alone, as cuda:0.

    Raises:
        SettingError: The name has another form, or there is no such kind of device here.

    Example:
        >>> device_of_worker("cpu", 3)
        'cpu'
    """
    devices = parse_devices(text)
    kind = devices[0].type
    there = [device for device in devices if device.index is not None and device.index < count_devices(kind)]
    return str(there[number % len(there)]) if there else resolve_device(kind)


def is_here(text: str) -> bool:
    """Whether torch sees devices of this kind on this machine."""
    return count_devices(parse_devices(text)[0].type) > 0


def _numbered(kind: str) -> str:
    return kind if kind in ("cpu", "mps") else f"{kind}:0"


def count_devices(kind: str) -> int:
    """How many devices of a kind torch can use here."""
    if kind == "cpu":
        return 1
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:  # a kind without a module, such as meta
        return 0
    return int(module.device_count()) if module.is_available() else 0


def list_devices(kind: str) -> list[str]:
    """The names of all devices of a kind, such as cuda:0 and cuda:1."""
    count = count_devices(kind)
    return [kind] * count if kind in ("cpu", "mps") else [f"{kind}:{i}" for i in range(count)]


def describe_device(text: str) -> str:
    """The device, or devices, with the product's name where torch knows it: "cuda:0 (NVIDIA L4)"."""
    if not is_here(text):
        return f"{text} (of the workers; the server step on cpu)"
    names = [torch.cuda.get_device_name(device) for device in parse_devices(text) if device.type == "cuda"]
    return f"{text} ({', '.join(dict.fromkeys(names))})" if names else text


def has_bfloat16_units(text: str) -> bool:
    """Whether an accelerator computes bfloat16 in hardware. Apple's first chips do not, so MPS counts as without.

    So does a device that only other machines have.
    """
    devices = parse_devices(text)
    return devices[0].type in ("cuda", "xpu") and is_here(text) and all(map(_computes_bfloat16, devices))


def _computes_bfloat16(device: torch.device) -> bool:
    module = torch.get_device_module(device)
    with module.device(device):  # torch answers for the current one
        return bool(module.is_bf16_supported(including_emulation=False))


def default_workers(text: str, cores: int) -> int:
    """The default number of worker processes: one for each core, but only a few for each accelerator."""
    devices = parse_devices(text)
    return cores if devices[0] == CPU else min(cores, WORKERS_PER_DEVICE * len(devices))


def ask_for_same_bits(device: torch.device) -> None:
    """Choose kernels that give the same bits in every run, where CUDA has a choice. For processes that fedbe owns."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory of a device is full. Each kind of device raises another one.

    Example:
        >>> is_out_of_memory(RuntimeError("MPS backend out of memory")), is_out_of_memory(RuntimeError("no such layer"))
        (True, False)
    """
    if not isinstance(error, RuntimeError):
        return False
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in FULL_MEMORY)


def is_device_failure(error: BaseException) -> bool:
    """Whether a device has failed, so that every later call of this process would fail, too (older torch: unknown)."""
    return isinstance(error, getattr(torch, "AcceleratorError", ())) and not is_out_of_memory(error)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, without waiting for what the device is computing.

    `Tensor.to` waits until a CUDA device has nothing left to do. Here the copy only joins the queue; that is safe from
    host memory to the device, and not the other way round.
    """
    if tensor.device == device:
        return tensor
    return tensor.to(device, non_blocking=device.type == "cuda" and tensor.device == CPU)
