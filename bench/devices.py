"""Writes docs/reference/devices.md from the catalogue of devices: `python bench/devices.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from drivetrain.plan.catalogue import PCIE_GB_PER_SECOND, Catalogue, Device, Dtype, catalogue

PAGE = Path(__file__).parents[1] / "docs/reference/devices.md"
TYPES: tuple[Dtype, ...] = ("float32", "tfloat32", "float16", "bfloat16", "float8")


def page(known: Catalogue) -> str:
    return "\n".join([*_devices(known), *_networks(known), *_sources(known)]) + "\n"


HEAD = """# Devices and networks that plans know

Made by `bench/devices.py` from the catalogue (devices.yaml in src/drivetrain/plan); [plan](../how-to/plan.md) shows how
to add your own. Rates are the makers' dense peaks in 10^12 floating-point operations a second, memory as nvidia-smi
shows it, links are one direction in GB/s. Numbers in brackets are sources, below. The makers' files could not be opened
where this table was made: most figures were compared with other publications that repeat them, some with none.
"""


def _devices(known: Catalogue) -> Iterator[str]:
    yield HEAD
    yield f"| name | other names | memory, GiB | GB/s | {' | '.join(TYPES)} | matmul reaches | link | PCIe | network |"
    yield "|---|---|--:|--:|" + "--:|" * len(TYPES) + "---|---|--:|---|"
    for name, device in known.devices.items():
        cells = (
            f"{name} {_mark(known, device.source)}",
            ", ".join(device.aliases),
            f"{device.memory_mib / 1024:.1f} {_mark(known, device.source_of('memory_mib'))}",
            f"{device.memory_gb_per_second:,.0f}",
            *(f"{device.tflops[each]:g}" if each in device.tflops else "" for each in TYPES),
            _reached(known, device),
            _link(known, device),
            f"{PCIE_GB_PER_SECOND[device.pcie]:g}",
            device.network,
        )
        yield f"| {' | '.join(cells)} |"


def _reached(known: Catalogue, device: Device) -> str:
    shares = ", ".join(f"{dtype} {share:.0%}" for dtype, share in device.matmul_efficiency.items())
    return f"{shares} {_mark(known, device.source_of('matmul_efficiency'))}" if shares else ""


def _link(known: Catalogue, device: Device) -> str:
    link = device.link
    if link is None:
        return ""
    return f"{link.kind}, {link.gb_per_second:g}, {link.reaches} devices {_mark(known, device.source_of('link'))}"


def _networks(known: Catalogue) -> Iterator[str]:
    yield from ("", "## Networks between nodes", "")
    yield from ("| name | what | GB/s of an adapter | adapters |", "|---|---|--:|---|")
    for name, network in known.networks.items():
        adapters = "one a device" if network.adapters == "device" else "one a node"
        title = f"{network.title} {_mark(known, network.source)}"
        yield f"| {name} | {title} | {network.gb_per_second:g} | {adapters} |"


def _sources(known: Catalogue) -> Iterator[str]:
    yield from ("", "## Sources", "")
    for number, source in enumerate(known.sources.values(), start=1):
        yield f"{number}. [{source.title}]({source.url})"


def _mark(known: Catalogue, source: str) -> str:
    return f"[{list(known.sources).index(source) + 1}]"


if __name__ == "__main__":
    PAGE.write_text(page(catalogue()))
