import numpy as np
import pytest
import xxhash
from hypothesis import assume, given
from hypothesis import strategies as st

from chapbook.kernels.chain import (
    BLOCK_TOKENS,
    HASH_BYTES,
    RunNamer,
    chain_hashes,
    chain_hashes_reference,
    longest_named,
    parse_run_name,
    run_name,
)
from chapbook.kernels.tokens import NO_TOKENS, token_ids

SEED = bytes(range(16))
OTHER_SEED = bytes(16)
MOST_TOKENS = 4 * BLOCK_TOKENS

seeds = st.binary(min_size=16, max_size=16)


@st.composite
def runs(draw):
    """Runs that often agree with one another for a while: counting up, with a few ids changed."""
    tokens = np.arange(draw(st.integers(0, MOST_TOKENS)))
    for at in draw(st.lists(st.integers(0, MOST_TOKENS), max_size=2)):
        tokens[at : at + 1] = -1
    return token_ids(tokens)


def longest_named_reference(wanted, held, *, seed):
    """The longest of the held runs that `wanted` begins with, by comparing tokens. `held` are (run, its seed)."""
    return max(
        (len(run) for run, its_seed in held if its_seed == seed and wanted.tolist()[: len(run)] == run.tolist()),
        default=0,
    )


@given(runs(), seeds)
def test_the_chain_is_that_of_hashing_one_token_after_another(tokens, seed):
    hashes = chain_hashes(tokens, seed=seed)
    assert hashes.shape == (len(tokens) // BLOCK_TOKENS, HASH_BYTES)
    assert hashes.dtype == np.uint8
    assert np.array_equal(hashes, chain_hashes_reference(tokens, seed=seed))


@given(runs(), runs())
def test_chains_agree_for_exactly_the_whole_blocks_that_two_runs_share(a, b):
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    ours, theirs = chain_hashes(a, seed=SEED), chain_hashes(b, seed=SEED)
    both = min(len(ours), len(theirs))
    agree = [np.array_equal(ours[block], theirs[block]) for block in range(both)]
    assert agree == [block < shared // BLOCK_TOKENS for block in range(both)]


@given(runs(), runs(), st.sampled_from([SEED, OTHER_SEED]), st.sampled_from([SEED, OTHER_SEED]))
def test_names_are_equal_exactly_where_runs_and_seeds_are(a, b, seed, other_seed):
    equal = a.tolist() == b.tolist() and seed == other_seed
    assert (run_name(a, seed=seed) == run_name(b, seed=other_seed)) is equal
    assert run_name(a, seed=seed) == run_name(token_ids(a.tolist()), seed=seed)


@given(runs(), st.data())
def test_the_name_at_a_length_is_the_name_of_the_run_cut_there(tokens, data):
    namer = RunNamer(tokens, seed=SEED)
    assert namer.length == len(tokens)
    for length in data.draw(st.lists(st.integers(0, len(tokens)), min_size=1, max_size=4)):
        name = namer.name(length)
        assert name == run_name(tokens[:length], seed=SEED)
        assert parse_run_name(name) == length


def test_every_length_of_a_run_has_a_name_of_its_own_and_so_has_its_rest():
    zeros = token_ids(np.zeros(MOST_TOKENS))
    names = [RunNamer(zeros, seed=OTHER_SEED).name(length) for length in range(MOST_TOKENS + 1)]
    assert len({name.rpartition("-")[0] for name in names}) == len(names)


def test_a_name_is_spelt_as_on_every_machine_and_in_every_version():
    tokens = token_ids([*range(255), -1, 70_000])
    chain = xxhash.xxh3_128_digest(SEED + b"".join(id.to_bytes(4, "little", signed=True) for id in [*range(255), -1]))
    rest = xxhash.xxh3_64_hexdigest(chain + b"\x70\x11\x01\x00")
    assert run_name(tokens, seed=SEED) == f"{chain.hex()}-{rest}-257"
    assert run_name(tokens, seed=SEED) == "bd5ef8e8628717bc32248a6008bd0266-38584e93f1305284-257"
    assert run_name(NO_TOKENS, seed=SEED) == f"{SEED.hex()}-{xxhash.xxh3_64_hexdigest(SEED)}-0"


@given(st.lists(st.tuples(runs(), st.sampled_from([SEED, OTHER_SEED])), max_size=5), runs(), st.data())
def test_the_longest_held_run_is_found_by_names_alone(held, wanted, data):
    beginnings = data.draw(st.lists(st.integers(0, len(wanted)), max_size=2))
    held = [*held, *((wanted[:length], SEED) for length in beginnings)]
    names = {run_name(run, seed=seed) for run, seed in held}
    found = longest_named(RunNamer(wanted, seed=SEED), names)
    assert found == longest_named_reference(wanted, held, seed=SEED)
    assert found >= max(beginnings, default=0)


def test_what_is_no_name_is_passed_over():
    tokens = token_ids(range(300))
    name = RunNamer(tokens, seed=SEED).name(280)
    assert longest_named(RunNamer(tokens, seed=SEED), {"", "tmp123", f"{name}.tmp", name}) == 280
    assert longest_named(RunNamer(tokens, seed=SEED), ()) == 0


@given(st.text(max_size=80))
def test_text_that_is_no_name_has_no_length(text):
    assume(len(text) < 32 + 16 + 3)
    assert parse_run_name(text) is None


@pytest.mark.parametrize(
    "spoil",
    [
        str.upper,
        lambda name: name[:32].upper() + name[32:],
        lambda name: name + "\n",
        lambda name: " " + name,
        lambda name: name + "0" * 5_000,
        lambda name: name[:-3] + "0" + name[-3:],
        lambda name: name[:-3] + "-280",
        lambda name: name[:-3] + "٢٨٠",
        lambda name: name[1:],
        lambda name: "../" + name[3:],
        lambda name: name.rpartition("-")[0],
    ],
)
def test_a_name_that_is_not_spelt_as_ours_has_no_length(spoil):
    name = RunNamer(token_ids(range(300)), seed=SEED).name(280)
    assert parse_run_name(name) == 280
    assert parse_run_name(spoil(name)) is None


@pytest.mark.parametrize("length", [-1, 301])
def test_a_run_has_no_name_at_a_length_that_it_has_not(length):
    with pytest.raises(ValueError, match=f"300 tokens has no beginning of {length}"):
        RunNamer(token_ids(range(300)), seed=SEED).name(length)


@pytest.mark.parametrize("seed", [b"", bytes(15), bytes(17)])
def test_a_seed_of_another_length_is_refused(seed):
    for use in (lambda: chain_hashes(NO_TOKENS, seed=seed), lambda: RunNamer(NO_TOKENS, seed=seed)):
        with pytest.raises(ValueError, match=f"16 bytes, not {len(seed)}"):
            use()
