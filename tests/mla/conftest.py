import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _few_threads():
    # Two cores, and the same arithmetic whatever the machine's default is.
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, before))
    yield
    torch.set_num_threads(before)
