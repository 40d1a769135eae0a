"""GPUs to compile for, described well enough that none has to be present."""

from dataclasses import dataclass

from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh


@dataclass(frozen=True)
class Target:
    """A GPU as its data sheet gives it; memory sizes in bytes, a core is a multiprocessor."""

    kind: str
    capability: tuple[int, int]
    cores: int
    shared_per_core: int
    shared_per_block: int
    threads_per_core: int
    fpus_per_core: int
    bandwidth: int
    l2: int
    clock_ghz: float
    memory: int

    @property
    def blocks_per_core(self) -> int:
        return {(7, 5): 16, (8, 9): 24}.get(self.capability, 32)

    def device(self):
        """A device to compile for, which nothing can run on."""
        major, minor = self.capability
        config = f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          core_count: {self.cores} threads_per_core_limit: {self.threads_per_core} fpus_per_core: {self.fpus_per_core}
          threads_per_warp: 32 threads_per_block_limit: 1024
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          shared_memory_per_core: {self.shared_per_core} shared_memory_per_block: 49152
          shared_memory_per_block_optin: {self.shared_per_block}
          memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2}
          clock_rate_ghz: {self.clock_ghz} device_memory_size: {self.memory}
        }}
        platform_name: "CUDA" device_description_str: "{self.kind}"
        """
        return topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=config).devices[0]

    def lowering(self):
        """Context in which tracing and lowering take this GPU for the device."""
        device = AbstractDevice(device_kind=self.kind, num_cores=self.cores, platform="gpu")
        return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30

TARGETS = {
    "sm_75": Target("Tesla T4", (7, 5), 40, 64 * _KIB, 64 * _KIB, 1024, 64, 320 * 10**9, 4 * _MIB, 1.59, 16 * _GIB),
    "sm_80": Target(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 164 * _KIB, 163 * _KIB, 2048, 64, 2039 * 10**9, 40 * _MIB, 1.41, 80 * _GIB
    ),
    "sm_89": Target("NVIDIA L4", (8, 9), 58, 100 * _KIB, 99 * _KIB, 1536, 128, 300 * 10**9, 48 * _MIB, 2.04, 24 * _GIB),
    "sm_90": Target(
        "NVIDIA H200", (9, 0), 132, 228 * _KIB, 227 * _KIB, 2048, 128, 4800 * 10**9, 50 * _MIB, 1.98, 141 * _GIB
    ),
    "sm_100": Target(
        "NVIDIA B200", (10, 0), 148, 228 * _KIB, 227 * _KIB, 2048, 128, 8000 * 10**9, 126 * _MIB, 1.965, 180 * _GIB
    ),
}

ALL_SHAPES = "sm_90"


def shapes_for(target: str, shapes: dict) -> dict:
    """Every model's shapes on one target, and the first model's on the others: compilers differ by target, kernels by
    shape, and what goes wrong with both at once would make the gate too slow to look for.
    """
    return shapes if target == ALL_SHAPES else dict(list(shapes.items())[:1])
