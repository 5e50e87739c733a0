import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

from jaxserve.build.replicas import place_replicas
from jaxserve.config import ParallelConfig
from jaxserve.errors import ConfigError


def test_one_replica_is_placed_as_ever():
    (placement,) = place_replicas(ParallelConfig(), None)
    assert placement.mesh is None


def test_more_replicas_than_devices_are_refused():
    with pytest.raises(
        ConfigError,
        match="data_parallel_size=2 with tensor_parallel_size=1 needs 2 devices: there are 1 cpu",
    ):
        place_replicas(ParallelConfig(data_parallel_size=2), None)


@pytest.mark.parametrize("mesh", ["cpu", AbstractMesh((2,), ("data",))])
def test_what_is_no_mesh_is_refused(mesh):
    with pytest.raises(ConfigError, match=r"mesh must be a jax\.sharding\.Mesh"):
        place_replicas(ParallelConfig(data_parallel_size=2), mesh)


@pytest.mark.parametrize("names", [("data",), ("model",)])
def test_a_mesh_without_an_axis_of_that_size_is_refused(names):
    mesh = Mesh(np.array(jax.devices()[:1]), names)
    with pytest.raises(ConfigError, match="must have one axis of that size"):
        place_replicas(ParallelConfig(data_parallel_size=2), mesh)
