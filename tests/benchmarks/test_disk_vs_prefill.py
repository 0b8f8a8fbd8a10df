"""The benchmark says what happened, and notices when it is not what should have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.disk_vs_prefill import main
from benchmarks.metering import Transferred
from benchmarks.page_cache import Dropped
from benchmarks.prefill import Engine, Form, Trial
from benchmarks.report import Result, answers
from benchmarks.ways import Restart, Run, Ways
from tests.mla.zoo import save_checkpoint

ROOT = Path(__file__).parents[2]
SMALL = ("--host-bytes", "32MiB", "--repeats", "1")
DEMO_KEYS = {
    "identical": bool,
    "max_logit_diff": float,
    "control_changed": bool,
    "tokens": int,
    "hit_tokens": int,
    "miss_tokens": int,
    "forwarded_tokens": int,
    "ttft_prefill_s": float,
    "ttft_disk_s": float,
    "ttft_host_s": float,
    "ttft_device_s": float,
    "restarted": bool,
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """Directory, figures and output of a demo with a short document and C = 128."""
    out = tmp_path_factory.mktemp("demo")
    files = ("--data", str(out), "--json", str(out / "demo.json"), "--plot", str(out / "demo.png"))
    command = [
        sys.executable,
        "-m",
        "benchmarks.disk_vs_prefill",
        "--demo",
        "--chunk",
        "128",
        "--tokens",
        "200,700",
    ]
    done = subprocess.run([*command, *SMALL, *files], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return out, json.loads((out / "demo.json").read_text()), done.stdout


def test_the_demo_writes_the_figures_that_were_promised(demo: tuple[Path, dict[str, Any], str]) -> None:
    _, figures, _ = demo
    assert {name: type(figures[name]) for name in DEMO_KEYS} == DEMO_KEYS
    assert (figures["identical"], figures["max_logit_diff"], figures["control_changed"]) == (True, 0.0, True)
    assert (figures["tokens"], figures["hit_tokens"], figures["miss_tokens"]) == (700, 640, 60)
    assert figures["forwarded_tokens"] == 60


def test_the_demo_kills_the_daemon_and_loads_from_another_one(demo: tuple[Path, dict[str, Any], str]) -> None:
    _, figures, _ = demo
    assert figures["restarted"]
    for length in figures["lengths"]:
        for restart in length["restarts"]:
            assert restart["pid_before"] != restart["pid_after"]
            assert restart["ended_by"] == -9
            with pytest.raises(ProcessLookupError):
                os.kill(restart["pid_after"], 0)


def test_each_way_is_what_it_is_called(demo: tuple[Path, dict[str, Any], str]) -> None:
    _, figures, _ = demo
    for length in figures["lengths"]:
        blocks = length["hit_tokens"] // 64
        assert length["cold_and_store"]["forwarded_tokens"] == length["tokens"]
        assert length["daemon_disk_reads_blocks"] == blocks
        for tier in ("disk", "host", "device"):
            (run,) = length[tier]
            assert run["hit_tokens_by_tier"] == {tier: length["hit_tokens"]}
            assert run["loaded_bytes"] == (
                0 if tier == "device" else blocks * figures["about"]["block_bytes"]
            )


def test_no_prefill_that_was_tried_is_faster_than_the_one_reported(
    demo: tuple[Path, dict[str, Any], str],
) -> None:
    _, figures, _ = demo
    tried = [trial for trial in figures["prefill_trials"] if trial["tokens"] == 700]
    assert {trial["engine"] for trial in tried} == {str(engine) for engine in Engine}
    cold = figures["lengths"][-1]["cold_and_store"]["seconds"]
    assert figures["ttft_prefill_s"] == min(cold, *(trial["seconds"] for trial in tried))


def test_the_demo_ends_with_table_picture_and_verdict(demo: tuple[Path, dict[str, Any], str]) -> None:
    out, figures, text = demo
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "Projection, not a measurement" in text
    assert figures["projection"]["nbytes"] == 2048 * 4_497_408
    assert "identical to the bit" in " ".join(text.split())
    assert "demo.png" in text
    assert {path.name for path in out.iterdir()} == {"demo.json", "demo.png"}


def test_a_checkpoint_is_read_with_its_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tmp_path / "checkpoint"
    save_checkpoint("deepseek_v2", checkpoint)
    (tmp_path / "text").write_text("Nothing is as long as a short text. " * 5)
    paths = (
        "--model",
        checkpoint,
        "--document",
        tmp_path / "text",
        "--data",
        tmp_path,
        "--json",
        tmp_path / "json",
    )
    assert main([*map(str, paths), "--tokens", "300", *SMALL]) == 0, capsys.readouterr().err
    figures = json.loads((tmp_path / "json").read_text())
    assert (figures["hit_tokens"], figures["forwarded_tokens"]) == (256, 44)
    assert figures["about"]["document_copies"] == 2
    assert "is repeated 2 times" in " ".join(capsys.readouterr().out.split())
    assert figures["lengths"][0]["restarts"][0]["ended_by"] == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--tokens", "12,x"), "--tokens '12,x': write whole numbers"),
        (("--tokens", "64"), "write 65 or more"),
        (("--tokens", "-5"), "--tokens"),
        (("--demo", "--tokens", "512"), "write 513 or more"),
        (("--tokens", "300000"), "the model has 262144 positions"),
        (("--chunk", "100"), "--chunk 100"),
        (("--repeats", "0"), "--repeats 0"),
        (("--document", "/nowhere/text"), "--document /nowhere/text: No such file"),
        (("--model", "/nowhere"), "--model /nowhere: no config.json"),
        (("--device", "abacus"), "--device abacus"),
        (("--json", "/dev/null/x.json"), "cannot be written"),
        (("--bogus",), "--bogus"),
    ],
)
def test_bad_input_is_one_line(
    arguments: Sequence[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert expected in errors[0]


def test_a_checkpoint_that_is_no_mla_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert main(["--model", str(tmp_path)]) == 2
    assert "not an MLA model" in capsys.readouterr().err


def _run(*logits: float) -> Run:
    return Run(1.0, 64, 1, 1, {}, Transferred(1, 100, 1.0), torch.tensor(logits))


def _result(**changes: Any) -> Result:
    dropped = Dropped(fadvise=True, drop_caches=False, stored_bytes=100, cached_before=100, cached_after=0)
    same, ways = _run(1.0, 2.0), (_run(1.0, 2.0),)
    restart = Restart(pid_before=1, pid_after=2, ended_by=-9, asked_for=-9, dropped=dropped)
    made = Ways(65, same, ways, ways, ways, _run(1.0, 3.0), same, (restart,), disk_reads=1)
    return Result(Trial(Form(Engine.SDPA, 512), 65, 2.0, torch.zeros(2)), replace(made, **changes))


def test_answers_that_differ_in_one_logit_of_one_run_are_not_identical() -> None:
    assert _result().identical
    for way in ("disk", "host", "device"):
        result = _result(**{way: (_run(1.0, 2.0), _run(1.0, 2.5))})
        assert not result.identical
        assert result.max_logit_diff == 0.5
        assert "different by up to 0.5" in answers(result, exact=True)
    assert not _result(mended=_run(0.0, 2.0)).identical


def test_a_control_without_effect_is_told() -> None:
    assert _result().control_changed
    blind = _result(control=_run(1.0, 2.0))
    assert not blind.control_changed
    assert "DOES NOT CHANGE" in answers(blind, exact=True)


@pytest.mark.parametrize("change", [{"pid_after": 1}, {"ended_by": 0}, {"ended_by": None}])
def test_a_daemon_that_was_not_killed_or_is_the_same_was_not_restarted(change: dict[str, Any]) -> None:
    assert _result().restarted
    restart = replace(_result().ways.restarts[0], **change)
    assert not _result(restarts=(restart,)).restarted


def test_the_run_that_stored_counts_as_prefill_if_it_was_the_fastest() -> None:
    assert _result().prefill_seconds == 1.0
    assert "while it stored" in _result().prefill_form
    slow = replace(_run(1.0, 2.0), seconds=9.0)
    assert (_result(cold=slow).prefill_seconds, _result(cold=slow).prefill_form) == (
        2.0,
        "stock sdpa, 512 tokens at once",
    )
