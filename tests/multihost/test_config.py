import pytest

from jaxserve.errors import ConfigError
from jaxserve.multihost.config import ProcessConfig


def test_one_process_is_the_leader_of_itself():
    config = ProcessConfig()
    assert config.is_leader
    assert not config.are_several


@pytest.mark.parametrize(
    ("address", "host"), [("10.0.0.1:1234", "10.0.0.1"), ("[::1]:80", "::1"), ("a.b:65535", "a.b")]
)
def test_the_host_of_an_address(address, host):
    config = ProcessConfig(coordinator_address=address, num_processes=4, process_id=3)
    assert config.host == host
    assert config.are_several
    assert not config.is_leader


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_processes": 0}, r"num_processes must be an integer in \[1, 4096\], got 0"),
        ({"num_processes": True}, "num_processes must be an integer"),
        ({"process_id": -1}, "process_id must be an integer"),
        ({"process_id": 1}, "process_id must be less than num_processes, 1, got 1"),
        ({"num_processes": 2}, "num_processes=2 needs coordinator_address"),
        ({"coordinator_address": "a:1"}, "coordinator_address is for several processes"),
        *(
            ({"num_processes": 2, "coordinator_address": address}, "must be host:port")
            for address in ("a", ":1", "a:", "a:0", "a:65536", "a:x", "a:²", 5)
        ),
        ({"process": 1}, "process"),
    ],
)
def test_a_bad_value_is_named(fields, message):
    with pytest.raises((ConfigError, TypeError), match=message):
        ProcessConfig(**fields)
