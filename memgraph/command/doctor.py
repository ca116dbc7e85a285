"""Check what a step under a budget depends on: versions, memory, disk, links, settings.

memgraph doctor   ->   ok    disk    /var/tmp, ext4, 53.2 GB free, writes 1.9 GB/s, reads 2.4 GB/s, O_DIRECT
                       slow  threads torch uses 1 of 16 cores: unset OMP_NUM_THREADS, or torch.set_num_threads(16)
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import RenderableType

from ..fit.measured_profile import measured_profile
from ..profile.link_bandwidth import measure_files, measure_host
from ..report.tables import mb, table
from ..storage.pinned_pool import cap_nbytes
from ..storage.spill_file import PAGE, available_nbytes, is_ram, mount_description, spill_folder, unnamed_file
from ..system.device import CPU, memory_nbytes, unused_nbytes
from ..system.measurement_cache import cache_folder
from ..system.page_pool import why_not
from ..system.private_names import TESTED
from .output import new_file, say, write

SLOW_DISK = 200.0  # bytes per microsecond: below that, copies rarely hide behind compute
LARGE = 32 << 20  # bytes of the copy whose rate is shown
OK, SLOW, MISSING = "ok", "slow", "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        verdict: "ok", "slow" or "missing".
        advice: what it costs and what mends it; empty if it is ok.
    """

    verdict: str
    what: str
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that was looked at."""

    findings: tuple[Finding, ...]

    def to_json(self) -> str:
        """Return the findings as a JSON list."""
        return json.dumps([asdict(finding) for finding in self.findings], indent=1)

    def __rich__(self) -> RenderableType:
        rows = table("what a step under a budget depends on", "", "what", "found", "what to do")
        for each in self.findings:
            rows.add_row(each.verdict, each.what, each.found, each.advice)
        return rows


def doctor(
    spill_dir: Annotated[str | None, typer.Option(help="the folder to offload to, as in memgraph.compile")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="write this CPU's figures to a file, for `memgraph fit`", callback=new_file)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> int:
    """Check versions, memory, disk, links and settings: what is slow, what it costs, what mends it.

    \b
        memgraph doctor
        memgraph doctor --spill-dir /mnt/nvme
        memgraph doctor --json   # to paste into an issue
        memgraph doctor --profile cpu.json && memgraph fit llama --device cpu.json
    """
    say("measuring links")
    folder = spill_folder(spill_dir)
    if profile is not None:
        profile.write_text(measured_profile(folder).to_json())
        say(f"wrote {profile}")
    write(Diagnosis((*_versions(), *_processor(), *_gpus(), *_disk(folder), _cache())), as_json)
    return 0


def _versions() -> Iterator[Finding]:
    yield Finding(OK, "system", f"Python {platform.python_version()}, {platform.platform()}")
    release = ".".join(torch.__version__.split(".")[:2])
    tried = "" if release in TESTED else f"not tested with memgraph; known to work: {', '.join(TESTED)}"
    yield Finding(SLOW if tried else OK, "torch", torch.__version__, tried)
    yield _package("highspy", "plans are greedy and no bound is proven: pip install highspy")
    if torch.cuda.is_available():
        yield _package("triton", "casts run in eager kernels: pip install triton")


def _package(name: str, advice: str) -> Finding:
    try:
        return Finding(OK, name, version(name))
    except PackageNotFoundError:
        return Finding(MISSING, name, "not installed", advice)


def _processor() -> Iterator[Finding]:
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    idle = f"OMP_NUM_THREADS or torch.set_num_threads({cores}) gives it all" if threads < cores else ""
    yield Finding(SLOW if idle else OK, "cores", f"torch uses {threads} of {cores}", idle)
    memory = f"{mb(memory_nbytes(CPU))}, {mb(unused_nbytes(CPU))} free"
    preload = os.environ.get("LD_PRELOAD", "")
    yield Finding(OK, "memory", memory)
    reason = why_not()
    yield Finding(
        SLOW if reason else OK, "pages", "freed ones go to the system" if reason else "kept in a pool", reason
    )
    other = "it may hold freed blocks below 128 KiB back" if "malloc" in preload else ""
    yield Finding(SLOW if other else OK, "allocator", preload or "glibc", other)


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding(OK, "GPU", "none that torch can use; steps run on the CPU and offload to a disk")
        return
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        facts = torch.cuda.get_device_properties(device)
        out, back = measure_host(device)
        rates = f"to the host {out.rate([LARGE]) / 1e3:.1f} GB/s, back {back.rate([LARGE]) / 1e3:.1f} GB/s"
        yield Finding(OK, str(device), f"{facts.name}, {mb(facts.total_memory)}, {rates}")
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    gaps = "" if "expandable_segments" in settings else "3 % of the device are left for gaps: expandable_segments:True"
    yield Finding(SLOW if gaps else OK, "PYTORCH_ALLOC_CONF", settings or "not set", gaps)
    yield Finding(OK, "pinned memory", f"at most {mb(cap_nbytes())}; MEMGRAPH_PINNED or host= sets it")


def _disk(folder: Path) -> Iterator[Finding]:
    where = f"{folder}, {mount_description(folder).split(' ')[-2]}, {mb(available_nbytes(folder))} free"
    if is_ram(folder):
        yield Finding(SLOW, "disk", where, "this folder is memory: offloading frees nothing; give spill_dir=")
        return
    out, back = (link.rate([LARGE]) for link in measure_files(folder))
    direct = "O_DIRECT" if _is_direct(folder) else "no O_DIRECT"
    found = f"{where}, writes {out / 1e3:.2f} GB/s, reads {back / 1e3:.2f} GB/s, {direct}"
    advice = [
        *(["copies take longer than compute can hide: give spill_dir= on a faster disk"] if out < SLOW_DISK else []),
        *(["offloaded bytes stay in the page cache for a while"] if direct != "O_DIRECT" else []),
    ]
    yield Finding(SLOW if advice else OK, "disk", found, "; ".join(advice))


def _is_direct(folder: Path) -> bool:
    """Return True if files there bypass the page cache."""
    file = unnamed_file(folder, PAGE)
    try:
        return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)
    finally:
        os.close(file)


def _cache() -> Finding:
    folder = cache_folder()
    if folder is None:
        return Finding(SLOW, "cache", "off", "each process measures and plans again: unset MEMGRAPH_CACHE")
    nearest = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    if not os.access(nearest, os.W_OK):
        return Finding(SLOW, "cache", str(folder), "not writable: set MEMGRAPH_CACHE to a folder that is")
    return Finding(OK, "cache", str(folder))
