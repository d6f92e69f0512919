"""Devices, as plans know them."""

from __future__ import annotations

from dataclasses import dataclass, replace

# From this compute capability on, targets have architecture-specific instructions (sm_90a), which no later device has,
# and launches may overlap (programmatic dependent launch).
FIRST_ARCH_SPECIFIC = 90


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """What a plan needs to know of a device. Sizes in bytes."""

    name: str
    arch: int  # compute capability, major and minor digit: 90 is 9.0; kernels use its instructions
    num_sms: int
    shared_bytes_per_block: int
    shared_bytes_per_sm: int
    l2_bytes: int
    bytes_per_s: float  # of device memory; 0 where the driver does not tell
    flops_16_bit: float = 0.0  # rate of products of 16-bit matrices that the vendor states; 0 where it is not known
    compiled_for: int | None = None  # the compute capability of the device itself, where `arch` is an earlier one

    @property
    def target(self) -> str:
        """The architecture as the compiler spells it."""
        return f"sm_{self.compiled_for or self.arch}"

    def target_for(self, source: str) -> str:
        """The same for a file of the kernels: "sm_90a" for those that use instructions of 9.0 alone.

        A file lies in the folder of its architecture, such as sm90, or in one for all architectures.
        """
        folder_arch = _number(source.partition("/")[0])
        return self.target + ("a" if folder_arch >= FIRST_ARCH_SPECIFIC else "")

    @property
    def overlaps_launches(self) -> bool:
        """Whether a kernel may start before the one before it has ended (programmatic dependent launch)."""
        return self.arch >= FIRST_ARCH_SPECIFIC

    def as_arch(self, arch: str) -> DeviceSpec:
        """The device as one of an earlier compute capability: kernels use no instructions of later ones."""
        if not 70 <= _number(arch) <= self.arch:
            raise ValueError(f"CUFLASH_ARCH: got {arch!r}, expected 7.0 to {self.arch / 10:.1f}, which {self.name} has")
        return replace(self, arch=_number(arch), compiled_for=self.arch)

    @property
    def shared_bytes_reserved(self) -> int:
        """Shared memory of an SM that each resident block takes besides its own."""
        return 1024 if self.arch >= 80 else 0

    @staticmethod
    def for_arch(arch: str) -> DeviceSpec:
        """A device of a compute capability ("8.0", "80" or "sm_80"). It need not be here."""
        if _number(arch) not in _DEVICES:
            known = ", ".join(f"{a // 10}.{a % 10}" for a in _DEVICES)
            raise ValueError(f"arch: got {arch!r}, expected one of {known}")
        return _DEVICES[_number(arch)]


def _number(arch: str) -> int:
    """90 for "9.0", "90", "sm_90" and "sm90"; 0 for anything that is no compute capability."""
    digits = str(arch).removeprefix("sm").removeprefix("_").replace(".", "")
    return int(digits) if digits.isdecimal() else 0


def why_by_lanes(dtype: str, device: DeviceSpec) -> str | None:
    """Why lanes multiply arrays of this dtype by themselves; None where tensor cores do.

    kernels/sm80/lane_products.cuh has the same. Tensor cores of 7.0 take float16, but in another layout.
    """
    first = 75 if dtype == "float16" else 80
    if device.arch >= first:
        return None
    return (
        f"slow: kernels use tensor cores for {dtype} from compute capability {first / 10:.1f} on, so multiply-adds of "
        "single numbers make its products"
    )


def _device(
    name: str, arch: int, num_sms: int, shared_kib_per_sm: int, l2_mib: int, gbytes_per_s: float, tflops: float = 0
) -> DeviceSpec:
    spec = DeviceSpec(
        name=name,
        arch=arch,
        num_sms=num_sms,
        shared_bytes_per_block=shared_kib_per_sm * 1024,
        shared_bytes_per_sm=shared_kib_per_sm * 1024,
        l2_bytes=l2_mib * 2**20,
        bytes_per_s=gbytes_per_s * 1e9,
        flops_16_bit=tflops * 1e12,
    )
    return replace(spec, shared_bytes_per_block=spec.shared_bytes_per_sm - spec.shared_bytes_reserved)


# Representatives of the compute capabilities, from the CUDA C++ Programming Guide (technical specifications per compute
# capability) and the vendor's pages for the number of SMs, L2, the bandwidth of device memory and the rate
# of dense products of 16-bit matrices with float32 sums.
_DEVICES = {
    spec.arch: spec
    for spec in (
        _device("V100", 70, 80, 96, 6, 900, 125),
        _device("T4", 75, 40, 64, 4, 320, 65),
        _device("A100", 80, 108, 164, 40, 1555, 312),
        _device("RTX 3090", 86, 82, 100, 6, 936, 71),
        _device("Jetson Orin", 87, 16, 164, 4, 204.8),
        _device("RTX 4090", 89, 128, 100, 72, 1008, 165.2),
        _device("H200", 90, 132, 228, 60, 4800, 989),
        _device("B200", 100, 148, 228, 126, 8000, 2250),
        _device("B300", 103, 148, 228, 126, 8000),
        _device("Jetson Thor", 110, 20, 228, 32, 273),
        _device("RTX 5090", 120, 170, 100, 96, 1792, 209.5),
        _device("DGX Spark", 121, 48, 100, 24, 273),
    )
}
