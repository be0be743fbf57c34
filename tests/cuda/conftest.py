"""What the tests of emulated kernels share."""

import pytest
from host_machine import Host, folder_of


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """The CPU in place of a GPU: kernels compiled by g++, kept for the whole run."""
    return Host(folder_of(tmp_path_factory))
