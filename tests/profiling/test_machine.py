from __future__ import annotations

import hashlib
import json

from profiling.measure.machine import card_state, decode_reasons, facts, flash_attn_3, run_command, source_digest

ANSWER = "1980, 3201, 694.31, 61, 0x0000000000000024"
STATE = {
    "sm_mhz": 1980.0,
    "mem_mhz": 3201.0,
    "power_w": 694.31,
    "temperature_c": 61.0,
    "clock_reasons": ["sw_power_cap", "sw_thermal_slowdown"],
}


def test_the_state_of_the_card_is_read():
    assert card_state(lambda command: ANSWER) == STATE


def test_an_older_driver_is_asked_by_the_older_name():
    def old_driver(command):
        return ANSWER if "clocks_throttle_reasons.active" in command[-2] else None

    assert card_state(old_driver) == STATE


def test_what_the_card_does_not_tell_is_none():
    state = card_state(lambda command: "1980, [N/A], [N/A], 61, [N/A]")
    assert (state["power_w"], state["clock_reasons"], state["sm_mhz"]) == (None, None, 1980.0)


def test_without_nvidia_smi_and_git_facts_remain(monkeypatch):
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    assert card_state(lambda command: None) == {}
    found = facts(lambda command: None)
    assert (found["driver"], found["git_commit"], found["git_dirty"]) == (None, None, None)
    assert found["torch"] and found["python"] and found["source_digest"]
    assert json.loads(json.dumps(found)) == found


def test_flash_attention_3_is_recorded_by_origin_and_digest(monkeypatch, tmp_path):
    monkeypatch.setenv("FA3_DIR", str(tmp_path))
    assert flash_attn_3() == {"origin": None, "version": None, "digest": None}
    (tmp_path / "_C.so").write_bytes(b"library")
    (tmp_path / "ORIGIN").write_text("Dao-AILab/flash-attention 0123abc\n")
    found = facts(lambda command: None)["flash_attn_3"]
    assert found["origin"] == "Dao-AILab/flash-attention 0123abc"
    assert found["digest"] == hashlib.sha256(b"library").hexdigest()[:16]
    assert str(tmp_path) not in json.dumps(found)


def test_without_flash_attention_3_there_is_none(monkeypatch):
    monkeypatch.delenv("FA3_DIR", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert flash_attn_3() is None


def test_without_git_the_commit_is_that_of_the_environment(monkeypatch):
    for told, expected in (("abc", "abc"), ("", None)):
        monkeypatch.setenv("GIT_COMMIT", told)
        assert facts(lambda command: None)["git_commit"] == expected


def test_the_dirty_flag():
    answers = {"status": " M cute_flash/api.py", "rev-parse": "abc", "nvidia-smi": "580.1\n580.1"}
    found = facts(lambda command: answers[command[1] if command[0] == "git" else command[0]])
    assert (found["git_dirty"], found["git_commit"], found["driver"]) == (True, "abc", "580.1")
    answers["status"] = ""
    assert facts(lambda command: answers[command[1] if command[0] == "git" else command[0]])["git_dirty"] is False


def test_no_reason_is_an_empty_list():
    assert decode_reasons("0x0000000000000000") == []
    assert decode_reasons("0x0000000000000101") == ["gpu_idle", "display_clock_setting"]


def test_a_command_that_is_missing_or_fails_is_none():
    assert run_command(("no-such-command-here",)) is None
    assert run_command(("git", "no-such-subcommand")) is None


def test_the_digest_follows_the_measured_source_only(tmp_path):
    (tmp_path / "cute_flash").mkdir()
    source = tmp_path / "cute_flash" / "a.py"
    source.write_text("x = 1\n")
    first = source_digest(tmp_path)
    (tmp_path / "README.md").write_text("other")
    assert source_digest(tmp_path) == first
    source.write_text("x = 2\n")
    assert source_digest(tmp_path) != first
