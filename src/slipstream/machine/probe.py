"""This machine, as NVML and Linux describe it, with what was measured on it before."""

from __future__ import annotations

import platform
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec

from slipstream.machine.machine import Machine, Versions
from slipstream.machine.nvml import NoGpus, read_gpus
from slipstream.machine.sysfs import read_cpu


def probe() -> Machine:
    """What is known of this machine without measuring, and the last calibration where one fits."""
    from slipstream.machine import cache

    found = probe_hardware()
    return cache.with_calibration(found)


def probe_hardware() -> Machine:
    """What is known of this machine without measuring."""
    notes: tuple[str, ...] = ()
    try:
        devices, links, driver = read_gpus()
    except NoGpus as why:
        devices, links, driver, notes = (), (), None, (str(why),)
    cpu = read_cpu()
    name = platform.node() or "here"
    about = f"{len(devices)} x {devices[0].name}" if devices else f"{cpu.threads} CPU threads, {cpu.name}"
    machine = Machine(
        name, about, devices, links, cpu, Versions(driver=driver, torch=_version("torch")), notes=notes
    )
    return replace(machine, versions=_cuda_versions(machine.versions)) if devices else machine


def _cuda_versions(versions: Versions) -> Versions:
    """CUDA and NCCL as torch carries them; importing torch takes a second, so only where there are GPUs."""
    if find_spec("torch") is None:
        return versions
    import torch

    cuda: str | None = torch.version.cuda
    nccl = (
        ".".join(str(part) for part in torch.cuda.nccl.version())
        if cuda and torch.cuda.is_available()
        else None
    )
    return replace(versions, cuda=cuda, nccl=nccl)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
