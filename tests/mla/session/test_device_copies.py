"""A session whose blocks take the way of a GPU's, with a driver that only keeps book."""

import pytest
import torch

from mla import transfer
from mla.registration import ArenaRegistration
from mla.transfer import DeviceTransfer
from tests.mla.session.conftest import MIB, logits, text
from tests.mla.streams import Driver, Here
from tests.server.conftest import start


@pytest.mark.parametrize("mode", ["mapped", "tcp-bytes"])
def test_a_hit_after_the_daemons_death_is_bit_identical(mode, model, workers, fleet, flags, monkeypatch):
    driver = Driver()
    known = ArenaRegistration(driver.register, driver.unregister)
    monkeypatch.setattr(transfer, "STAGING_BYTES", 1)  # a block at a time
    monkeypatch.setattr("mla.pool.transfer_for", lambda data: DeviceTransfer(data, Here(), Here(), known))
    daemon = start(fleet, mode, flags)
    worker = workers(model, fleet.connect(daemon.url), exact=True)
    cold = worker.ask(text(700))
    assert worker.session.flush()
    first = dict(driver.pieces)
    if mode == "mapped":
        daemon.restart()
    worker.session.pool.clear()
    again = worker.ask(text(700))
    assert again.usage.prompt_cache_hit_tokens == 640
    assert torch.equal(logits(again), logits(cold))
    known.join()
    if mode == "mapped":
        assert sum(driver.pieces.values()) == sum(first.values()) == 64 * MIB
        assert sorted(driver.gone) == sorted(first)  # the arena of the daemon that died
    else:
        assert not driver.pieces
