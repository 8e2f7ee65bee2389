"""The doctor tells what is there, what an absence costs, and an apex that is not NVIDIA's."""

import sys

from megatron_dapo import doctor
from megatron_dapo.__main__ import main


def test_this_environment_can_run_the_quick_start(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for name in ("torch", "megatron-core", "Transformer Engine", "apex", "sglang", "NCCL", "GPUs"):
        assert name in out
    assert "The quick start can run." in out


def test_what_is_needed_and_missing_fails(monkeypatch, capsys):
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda package: None if package == "megatron-core" else version(package))
    assert doctor.main() == 1
    out = capsys.readouterr().out
    assert "absent: nothing trains" in out and "cannot run without megatron-core" in out


def test_an_apex_that_is_not_nvidias_is_reported(tmp_path, monkeypatch, capsys):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex/__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    doctor.main()
    sys.modules.pop("apex", None)
    assert "not NVIDIA's: pip uninstall apex" in capsys.readouterr().out
