"""Devices, as plans know them."""

from __future__ import annotations

from dataclasses import dataclass

SHARED_BYTES_RESERVED = 1024  # that a resident block takes of a multiprocessor's shared memory beside its own


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """What a plan needs to know of a device. Sizes in bytes."""

    name: str
    arch: int  # compute capability, major and minor digit: 90 is 9.0
    num_sms: int
    shared_bytes_per_block: int
    shared_bytes_per_sm: int
    l2_bytes: int
    bytes_per_s: float  # of device memory; 0 where the driver does not tell

    @property
    def target(self) -> str:
        """The architecture as the compiler spells it."""
        return f"sm_{self.arch}"

    @staticmethod
    def for_arch(arch: str) -> DeviceSpec:
        """A device that need not be here, by its compute capability: "8.0", "80" or "sm_80"."""
        digits = str(arch).removeprefix("sm_").replace(".", "")
        if not digits.isdecimal() or int(digits) not in _DEVICES:
            known = ", ".join(f"{a // 10}.{a % 10}" for a in _DEVICES)
            raise ValueError(f"arch: got {arch!r}, expected one of {known}")
        return _DEVICES[int(digits)]


def _device(name: str, arch: int, num_sms: int, shared_kib_per_sm: int, l2_mib: int, gbytes_per_s: float) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        arch=arch,
        num_sms=num_sms,
        shared_bytes_per_block=(shared_kib_per_sm - 1) * 1024,
        shared_bytes_per_sm=shared_kib_per_sm * 1024,
        l2_bytes=l2_mib * 2**20,
        bytes_per_s=gbytes_per_s * 1e9,
    )


# Representatives of the compute capabilities, from the CUDA C++ Programming Guide (technical specifications per compute
# capability) and the vendor's pages for the number of multiprocessors, L2 and the bandwidth of device memory.
_DEVICES = {
    spec.arch: spec
    for spec in (
        _device("A100", 80, 108, 164, 40, 1555),
        _device("RTX 3090", 86, 82, 100, 6, 936),
        _device("Jetson Orin", 87, 16, 164, 4, 204.8),
        _device("RTX 4090", 89, 128, 100, 72, 1008),
        _device("H200", 90, 132, 228, 60, 4800),
        _device("B200", 100, 148, 228, 126, 8000),
        _device("B300", 103, 148, 228, 126, 8000),
        _device("Jetson Thor", 110, 20, 228, 32, 273),
        _device("RTX 5090", 120, 170, 100, 96, 1792),
        _device("DGX Spark", 121, 48, 100, 24, 273),
    )
}
