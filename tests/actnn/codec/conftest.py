"""What the tests of the codec share."""

import pytest
from host_machine import Host, folder_of

from actnn.codec import Key, noise_state
from actnn.codec.cuda.executor import SOURCES


@pytest.fixture(scope="session")
def host(tmp_path_factory):
    """The CPU in place of a GPU, with the kernels of the codec."""
    return Host(folder_of(tmp_path_factory), sources=SOURCES)


@pytest.fixture
def key():
    return Key(noise_state(3), 5)
