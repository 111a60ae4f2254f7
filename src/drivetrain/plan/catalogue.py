"""The catalogue of devices: their peak rates, memory and links, each figure with its source; users add their own."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from drivetrain.config.base import Frozen, doc
from drivetrain.config.files import MOST_YAML_BYTES, parsed_yaml, read_text, read_yaml
from drivetrain.errors import Problem, UserError, problem, shown

OWN = Path(__file__).with_name("devices.yaml")
NOT_LISTED = "float32"  # the type whose rate a device has for types that it does not list
MOST_LISTED = 40  # names in a message
USERS = "the user's file"
# 10^9 bytes a second in one direction over 16 lanes: PCI-SIG, PCI Express base specifications 3.0 to 6.0
PCIE_GB_PER_SECOND = {3: 15.75, 4: 31.5, 5: 63.0, 6: 121.0}

Dtype = Literal["float32", "tfloat32", "float16", "bfloat16", "float8"]


class Source(Frozen):
    """The publication that a figure is taken from."""

    title: str = doc("Name of the data sheet, page or paper")
    url: str = doc("Its address", "")


class Link(Frozen):
    """The link of a device to the others of its node."""

    kind: str = doc("Name, such as NVLink 4")
    gb_per_second: float = doc("10^9 bytes a second in one direction", gt=0)
    reaches: int = doc("Devices that it joins", gt=1)


class Network(Frozen):
    """The network between nodes."""

    title: str = doc("Name for messages")
    gb_per_second: float = doc("10^9 bytes a second of one adapter in one direction", gt=0)
    adapters: Literal["device", "node"] = doc("One a device, or one that a node's devices share")
    source: str = doc("Source of the figures", USERS)


class Device(Frozen):
    """A kind of device. Rates are dense peaks, as the maker publishes them."""

    title: str = doc("Full name")
    aliases: tuple[str, ...] = doc("Other names", ())
    memory_mib: int = doc("Memory of one device, in 2^20 bytes", gt=0)
    memory_gb_per_second: float = doc("Bandwidth of its memory, 10^9 bytes a second", gt=0)
    tflops: dict[Dtype, float] = doc("Dense peak by type, in 10^12 floating-point operations a second")
    compute_capability: tuple[int, int] | None = doc("NVIDIA's generation, such as [9, 0]", None)
    link: Link | None = doc("Link to the other devices of a node; left out, they use PCIe", None)
    pcie: Literal[3, 4, 5, 6] = doc("Generation of the 16 lanes to the host")
    host_memory_mib: int | None = doc("Memory of a node's host, in 2^20 bytes, for what engines keep there", None, gt=0)
    network: str = doc("Network between nodes, where the machine names none")
    matmul_efficiency: dict[Dtype, float] = doc(
        "Largest share of tflops that a matrix product was measured to reach", {}
    )
    source: str = doc("Source of the figures", USERS)
    sources: dict[str, str] = doc("Source of single figures, by field", {})

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib * 2**20

    @property
    def native_dtypes(self) -> frozenset[str]:
        """The types that PyTorch multiplies without emulation; every GPU stores and multiplies float16."""
        return frozenset({"float32", "float16"} | (self.tflops.keys() & {"bfloat16"}))

    def peak_flops(self, dtype: str) -> float:
        """Returns the dense peak for products of a type, in FLOP/s."""
        rates = {str(name): rate for name, rate in self.tflops.items()}
        return 1e12 * rates.get(dtype, rates[NOT_LISTED])

    def source_of(self, field: str) -> str:
        return self.sources.get(field, self.source)


class _File(Frozen):
    """A file of devices."""

    sources: dict[str, Source] = doc("Publications, by name", {})
    networks: dict[str, Network] = doc("Networks between nodes, by name", {})
    devices: dict[str, Device] = doc("Devices, by name", {})


@dataclass(frozen=True)
class Catalogue:
    """All known devices and networks, by name."""

    devices: Mapping[str, Device]
    networks: Mapping[str, Network]
    sources: Mapping[str, Source]

    def device(self, name: str, field: str = "--machine") -> tuple[str, Device]:
        """Returns a device's name in the catalogue and its figures. Case, spaces and hyphens do not matter.

        Raises UserError for one that is not known, with names that are near.
        """
        known = self._by_spelling
        if found := known.get(_spelling(name)):
            return found, self.devices[found]
        near = [known[each] for each in difflib.get_close_matches(_spelling(name), known, n=3, cutoff=0.5)]
        meant = f"did you mean {' or '.join(dict.fromkeys(near))}? " if near else ""
        listed = ", ".join(list(self.devices)[:MOST_LISTED])
        why = f"{shown(name)} is no device of the catalogue"
        raise problem(field, why, f"{meant}Known: {listed}; --devices FILE.yaml adds your own")

    def knows(self, name: str) -> bool:
        return _spelling(name) in self._by_spelling

    def near(self, name: str) -> str | None:
        """Returns the nearest name of a device, as people call it where it has such a name; None if none is near."""
        names = [*self.devices, *(alias for device in self.devices.values() for alias in device.aliases)]
        spelt = {_spelling(each): each for each in sorted(names, key=len, reverse=True)}
        found = difflib.get_close_matches(_spelling(name), spelt, n=1)
        return spelt[found[0]] if found else None

    def network(self, name: str, field: str = "--machine") -> Network:
        if name in self.networks:
            return self.networks[name]
        near = difflib.get_close_matches(name, self.networks, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise problem(
            field, f"{shown(name)} is no network of the catalogue", f"{meant}Known: {', '.join(self.networks)}"
        )

    def named_by_driver(self, name: str) -> tuple[str, Device] | None:
        """Returns the device that a driver calls so ("NVIDIA H100 80GB HBM3"); None if it is not in the catalogue."""
        found = self._by_spelling.get(_spelling(name))
        return None if found is None else (found, self.devices[found])

    @functools.cached_property
    def _by_spelling(self) -> dict[str, str]:
        names = {_spelling(alias): name for name, device in self.devices.items() for alias in device.aliases}
        return names | {_spelling(name): name for name in self.devices}


def catalogue(own: Path | None = None) -> Catalogue:
    """Returns the devices that come along, and those of the user's file; where both have a name, the user's.

    Raises UserError with every problem of the file.
    """
    base = _shipped()
    if own is None:
        return base
    added = _checked(read_yaml(own), str(own), base)
    return Catalogue(
        {**base.devices, **added.devices}, {**base.networks, **added.networks}, {**base.sources, **added.sources}
    )


@functools.cache
def _shipped() -> Catalogue:
    found = _File.model_validate(parsed_yaml(read_text(OWN, MOST_YAML_BYTES)))
    return Catalogue(found.devices, found.networks, found.sources)


def _checked(raw: dict[str, Any], where: str, base: Catalogue) -> _File:
    try:
        found = _File.model_validate(raw)
    except ValidationError as error:
        raise UserError([_problem(detail, where) for detail in error.errors()]) from None
    problems = [*_problems(found, where, base)]
    if problems:
        raise UserError(problems)
    return found


def _problems(found: _File, where: str, base: Catalogue) -> Iterator[Problem]:
    if not found.devices and not found.networks:
        yield Problem(where, "it has neither devices nor networks", "write `devices:` with a block for each device")
    networks = {**base.networks, **found.networks}
    for name, device in found.devices.items():
        place = f"{where}: devices.{name}"
        if not re.fullmatch(r"[A-Za-z][\w.+-]*", name):
            yield Problem(place, "a name begins with a letter and has no spaces", "write it like RTX-6000")
        if NOT_LISTED not in device.tflops:
            yield Problem(f"{place}.tflops", f"{NOT_LISTED} is missing", "types that are not listed have its rate")
        if device.network not in networks:
            near = difflib.get_close_matches(device.network, networks, n=1)
            fix = f"did you mean {near[0]}?" if near else f"one of {', '.join(networks)}"
            yield Problem(f"{place}.network", f"there is no network {shown(device.network)}", fix)
        for block, figures in (("tflops", device.tflops), ("matmul_efficiency", device.matmul_efficiency)):
            most = 1.0 if block == "matmul_efficiency" else float("inf")
            for dtype, figure in figures.items():
                if not 0 < figure <= most:
                    fix = "give a share of the peak, as 0.8" if most == 1 else "give a number above 0"
                    yield Problem(f"{place}.{block}.{dtype}", f"{figure:g} was given", fix)
        for field in device.sources.keys() - Device.model_fields.keys():
            yield Problem(f"{place}.sources.{field}", "a device has no such figure", f"one of {_names(Device)}")


def _problem(detail: ErrorDetails, where: str) -> Problem:
    """Returns a problem for one of pydantic's, with the field that was probably meant."""
    path = [str(part) for part in detail["loc"] if part != "[key]"]
    field = f"{where}: {'.'.join(path)}"
    block = _block_of(path)
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(path[-1], block.model_fields, n=1)
        return Problem(field, "there is no such key", f"did you mean {near[0]}?" if near else f"one of {_names(block)}")
    about = block.model_fields.get(path[-1])
    fix = (about.description if about else None) or "correct the value"
    if detail["type"] == "missing":
        return Problem(field, "is required and was not given", fix)
    message = detail["msg"].removeprefix("Value error, ")
    return Problem(field, f"{shown(detail['input'])} was given; {message[0].lower()}{message[1:]}", fix)


def _block_of(path: list[str]) -> type[BaseModel]:
    """Returns the kind of block in which a path's last key stands."""
    blocks: dict[str, type[BaseModel]] = {"devices": Device, "networks": Network, "sources": Source}
    if len(path) < 3:
        return _File
    return Link if path[0] == "devices" and path[2] == "link" and len(path) > 3 else blocks[path[0]]


def _names(block: type[BaseModel]) -> str:
    return ", ".join(block.model_fields)


def _spelling(name: str) -> str:
    """Returns a name without what people write differently: case, spaces, hyphens, the maker's name."""
    return re.sub(r"[^a-z0-9]", "", re.sub(r"(?i)\b(nvidia|geforce|amd|instinct)\b", "", name).lower())
