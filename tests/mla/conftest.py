import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _few_threads():
    # Small matrices on a shared machine: threads that wait for each other only cost time.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
