"""`chapbook artifact` on a real store, without a model."""

from __future__ import annotations

import json
import os

import pytest

from chapbook.compaction.artifacts import ArtifactStore

MARKDOWN = "# One\n\nA [link](to).\n\n## Two\n\n- needle\n- \x1b[2Jescape\n"


@pytest.fixture
def store(workspace):
    """Return the store of the workspace."""
    (workspace / ".chapbook").mkdir()
    return ArtifactStore(workspace / ".chapbook" / "artifacts")


@pytest.fixture
def stored(store):
    """Return a function that stores text at a time and returns its id."""

    def put(data, *, at=1_700_000_000):
        ref = store.put(data.encode() if isinstance(data, str) else data)
        os.utime(ref.path, (at, at))
        return ref.short_id

    return put


def test_artifacts_are_listed_the_one_stored_last_first(run, stored, store):
    old = stored(MARKDOWN)
    new = stored(b"\0\1\xff" * 500, at=1_700_100_000)
    broken = stored("altered", at=1_600_000_000)
    store.lookup(broken).path.write_text("AltereD")
    os.utime(store.lookup(broken).path, (1_600_000_000, 1_600_000_000))
    told = json.loads(run("artifact", "list", "--json").stdout)
    assert [each["id"] for each in told] == [new, old, broken]
    assert [(each["size_bytes"], each["lines"], each["kind"]) for each in told] == [
        (1500, None, "binary"),
        (len(MARKDOWN), 8, "Markdown"),
        (7, None, None),
    ]
    assert "not what was stored" in told[2]["problem"]
    head, *rows = run("artifact", "list").stdout.splitlines()
    assert head.split() == ["id", "size", "lines", "kind", "stored"]
    assert [row.split()[0] for row in rows] == [new, old, broken]
    assert rows[2].split()[1:4] == ["7", "B", "damaged"]
    assert [each["is_damaged"] for each in told] == [False, False, True]
    assert max(map(len, rows)) < 80
    assert "2023-11-1" in rows[1]


def test_an_artifact_is_looked_into_as_the_model_does(run, stored):
    id = stored(MARKDOWN)
    assert run("artifact", "toc", id).stdout == "1\t# One\n5\t## Two\n[contents of Markdown, 8 lines: 1-2 of 2]\n"
    assert run("artifact", "search", id, "NEEDLE").stdout == (
        "5\t## Two\n6\t\n7:\t- needle\n8\t- escape\n[1 hit in 8 lines]\n"
    )
    assert run("artifact", "read", id, "--offset=5", "--limit=1").stdout == (
        "5\t## Two\n[lines 5-5 of 8; next: offset=6]\n"
    )
    assert run("artifact", "read", id, "--offset=7", "--column=3").stdout.startswith("7\tneedle\n")
    assert run("artifact", "search", id, "one|two", "--offset=2").stdout.count(":\t") == 1


def test_it_answers_with_more_room_than_a_model_has(run, stored):
    id = stored("a needle in some hay\n" * 3000)
    ended = run("artifact", "search", id, "needle")
    assert 35_000 < len(ended.stdout) <= 40_001
    assert "next: offset=" in ended.stdout


def test_what_could_act_on_a_terminal_is_spelled_out_there_and_raw_in_a_pipe(run, terminal, stored):
    id = stored(MARKDOWN)
    shown = terminal("artifact", "read", id, "--offset", "8")
    shown.wait_for("lines 8-8 of 8")
    assert shown.end() == 0
    assert "- \\u001b[2Jescape" in shown.shown
    assert "\x1b[2J" not in shown.shown
    assert "- \x1b[2Jescape\n" in run("artifact", "read", id, "--offset", "8").stdout


def test_verify_names_what_is_bad_and_ends_with_1(run, stored, store):
    stored(MARKDOWN)
    bad = store.lookup(stored("to be altered"))
    ended = run("artifact", "verify")
    assert (ended.returncode, ended.stdout) == (0, f"2 artifacts, {len(MARKDOWN) + 13} B: as stored\n")
    bad.path.write_text("TO BE ALTERED")
    (store.folder / "aa").mkdir(exist_ok=True)
    (store.folder / "aa" / "x\x1b[2J").write_text("")
    ended = run("artifact", "verify")
    assert ended.returncode == 1
    assert f"problem: {bad.path}: it is not what was stored" in ended.stdout
    assert "x\\u001b[2J: no file of the store" in ended.stdout
    told = run("artifact", "verify", "--json")
    assert told.returncode == 1
    assert {each["path"] for each in json.loads(told.stdout)["problems"]} >= {str(bad.path)}


def test_a_store_that_is_not_there_is_said_so_and_not_created(run, workspace):
    assert "no artifacts in" in run("artifact", "list").stderr
    assert json.loads(run("artifact", "list", "--json").stdout) == []
    assert run("artifact", "verify").returncode == 0
    ended = run("artifact", "read", "ab" * 6)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f"there is no artifact store at {workspace / '.chapbook' / 'artifacts'}" in ended.stderr
    assert not (workspace / ".chapbook").exists()


def test_wrong_ids_places_and_patterns_are_errors(run, stored):
    id = stored(MARKDOWN)
    for command, problem in (
        (("read", "../../etc/passwd"), "names no artifact"),
        (("read", "f" * 12), "no artifact ffffffffffff"),
        (("read", id, "--offset=99"), "has 8 lines; offset 99 is past its end"),
        (("search", id, ""), "the pattern is empty"),
    ):
        ended = run("artifact", *command)
        assert (ended.returncode, ended.stdout) == (1, "")
        assert problem in ended.stderr
    assert run("artifact", "read", id, "--limit=0").returncode == 2


def test_programs_get_the_answer_and_where_to_go_on(run, stored):
    id = stored(MARKDOWN)
    for command, text, place in (
        (("read", id, "--limit=1"), "1\t# One\n[lines 1-1 of 8; next: offset=2]", {"offset": 2, "column": 1}),
        (("toc", id), "1\t# One\n5\t## Two\n[contents of Markdown, 8 lines: 1-2 of 2]", None),
        (("search", id, "--", "- NEEDLE"), "5\t## Two\n6\t\n7:\t- needle\n8\t- escape\n[1 hit in 8 lines]", None),
    ):
        ended = run("artifact", *command[:2], "--json", *command[2:])
        assert json.loads(ended.stdout) == {"text": text, "next": place}


def test_raw_writes_every_byte_and_stops_at_what_has_changed(start, run, terminal, stored, store):
    def raw(id):
        process = start("artifact", "read", id, "--raw")
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    for data in (b"\0\xff\r\n" * 9, "größer\r\n".encode("utf-16"), b"x" * 3_000_000):
        assert raw(stored(data)) == (0, data, b"")
    id = stored(b"y" * 3_000_000)
    with store.lookup(id).path.open("r+b") as file:
        file.seek(2_000_000)
        file.write(b"z")
    code, out, err = raw(id)
    assert code == 1
    assert 1_900_000 < len(out) <= 2_000_000
    assert set(out) == {ord("y")}
    assert b"have changed" in err
    assert run("artifact", "read", id, "--raw", "--offset=2").returncode == 2
    shown = terminal("artifact", "read", id, "--raw")
    assert shown.end() == 2
    assert "send it to a file or a pipe" in shown.shown


def test_binary_content_is_shown_as_hex(run, stored):
    assert run("artifact", "read", stored(b"\0\xff" * 9), "--offset=2").stdout == (
        f"2\t{'00 ff':<47}  |..|\n[lines 2-2 of 2, each 16 bytes of binary content]\n"
    )
