"""Wrong arrays in calls of a codec: one UsageError that names them, the same on every backend."""

import numpy as np
import pytest

import compll

N, FAR = 3000, 2**63 - 1
TARGETS = ("reference", "cpu")


@pytest.fixture(params=TARGETS)
def codec(request):
    return compll.compile("onebit_group", request.param)


class Batch:
    """The correct arguments of a batch of one piece."""

    def __init__(self, codec):
        self.codec, self.size = codec, codec.payload_bytes(N)
        self.x, self.table = np.zeros(N, np.float32), np.array([[0, N, 0, 0, 0]])
        self.out, self.at = np.zeros(self.size, np.uint8), np.zeros(1, np.int64)
        self.used, self.state = np.array([self.size]), codec.init_state(N)

    def encode(self, **more):
        given = (self.x, self.table, self.out, self.at)
        return self.codec.encode_batch(*given, state=self.state, **more)

    def decode(self):
        self.codec.decode_batch(self.out, self.table, self.at, self.used, self.x)


@pytest.mark.parametrize("column", [0, 1, 4])
def test_places_whose_end_no_int64_holds(codec, column):
    for call in (Batch.encode, Batch.decode) if column < 4 else (Batch.encode,):
        batch = Batch(codec)
        batch.table[0, column] = FAR
        with pytest.raises(compll.UsageError, match=str(FAR)[:15]):
            call(batch)


def test_payloads_whose_end_no_int64_holds(codec):
    batch = Batch(codec)
    batch.at[0] = FAR
    with pytest.raises(compll.UsageError, match=f"need {FAR + batch.size} bytes"):
        batch.encode()
    with pytest.raises(compll.PayloadError, match="ends early"):
        batch.decode()
    batch.at[0], batch.used[0] = 1, FAR
    with pytest.raises(compll.PayloadError, match="ends early"):
        batch.decode()


def test_incoming_payloads_begin_within_theirs(codec):
    batch = Batch(codec)
    for first, error in ((-5, compll.UsageError), (FAR, compll.PayloadError)):
        with pytest.raises(error, match="byte"):
            batch.encode(incoming=(batch.out.copy(), np.array([first]), batch.used))


def locked(array):
    array.flags.writeable = False
    return array


def shifted(array):
    """The same numbers at addresses that are not multiples of their size."""
    room = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype)
    room[:] = array
    return room


#: (argument, its mistake, a part of the message)
WRONG = [
    ("table", np.ndarray.tolist, "table is a contiguous int64 array [m, 5], not list"),
    ("table", lambda t: np.asfortranarray(np.repeat(t, 2, 0)), "not one with strides (8, 16)"),
    ("table", lambda t: t[:, :4].copy(), "not int64 (1, 4)"),
    ("table", lambda t: t.astype(np.int32), "not int32 (1, 5)"),
    ("table", lambda t: t - 3, "a number of the table is -3"),
    ("at", np.ndarray.tolist, "at is a contiguous int64 vector, not list"),
    ("at", lambda a: a.astype(np.int32), "at is a contiguous int64 vector, not int32 (1,)"),
    ("at", lambda a: a - 5, "byte -5"),
    ("at", lambda a: np.repeat(a, 2), "the table has 1 rows, and at 2 positions"),
    ("out", bytes, "out is a contiguous uint8 vector, not bytes"),
    ("out", locked, "out is a contiguous uint8 vector, not a read-only one"),
    ("out", lambda o: o.view(np.int8), "out is a contiguous uint8 vector, not int8"),
    ("out", lambda o: np.repeat(o, 2)[::2], "not one with strides (2,)"),
    ("out", lambda o: o[None], "out is a contiguous uint8 vector, not uint8 (1, "),
    ("x", np.ma.array, "float32 array is needed, not a masked array"),
    ("x", shifted, "float32 array is needed, not one that begins at address"),
]


def refusal(batch, name, spoil, call):
    """The error of a call for a batch with one wrong array."""
    setattr(batch, name, spoil(getattr(batch, name)))
    with pytest.raises(compll.UsageError) as caught:
        call(batch)
    return str(caught.value)


@pytest.mark.parametrize("name, spoil, told", WRONG)
def test_wrong_arrays_are_told_by_their_names(codec, name, spoil, told):
    assert told in refusal(Batch(codec), name, spoil, Batch.encode)


@pytest.mark.parametrize(
    "spoil, told",
    [
        (lambda s: np.repeat(s, 2)[::2], "not one with strides (8,)"),
        (locked, "not a read-only one"),
        (lambda s: s[:, None], "not float32 (3000, 1)"),
        (lambda s: s.astype(np.float64), "not float64 (3000,)"),
        (np.ma.array, "not a masked array"),
        (np.ndarray.tolist, "not list"),
        (lambda s: s[1:], "'residual' has 2999 elements, 3000 are needed"),
    ],
)
def test_wrong_states_are_told(codec, spoil, told):
    batch = Batch(codec)
    batch.state = {"residual": spoil(batch.state["residual"])}
    with pytest.raises(compll.UsageError) as caught:
        batch.encode()
    assert told in str(caught.value)
    assert "state 'residual'" in str(caught.value)


@pytest.mark.parametrize(
    "name, spoil, told",
    [
        ("out", np.ndarray.tolist, "payload is a contiguous uint8 vector, not list"),
        ("at", lambda a: a - 5, "byte -5"),
        ("used", np.ndarray.tolist, "used is a contiguous int64 vector, not list"),
        ("used", lambda u: u.astype(np.float64), "used is a contiguous int64 vector, not float64"),
    ],
)
def test_wrong_arrays_of_a_decode_are_told(codec, name, spoil, told):
    assert told in refusal(Batch(codec), name, spoil, Batch.decode)


def test_inputs_may_be_read_only(codec):
    batch = Batch(codec)
    for name in ("x", "table", "at", "used"):
        locked(getattr(batch, name))
    batch.encode()
    locked(batch.out)
    batch.x = np.ones(N, np.float32)
    batch.decode()
    assert not batch.x.any()


class Tensor:
    """A tensor with only the members that codecs use."""

    def detach(self):
        raise AssertionError


@pytest.mark.parametrize(
    "x, meant",
    [
        (np.zeros(9), "x.astype(np.float32) makes one"),
        (np.zeros(18, np.float32)[::2], "np.ascontiguousarray(x) makes one"),
        (Tensor(), "x.detach().numpy() of a CPU tensor is one"),
        ([0.0], "not list"),
    ],
)
def test_an_error_shows_how_to_make_the_argument(codec, x, meant):
    with pytest.raises(compll.UsageError) as error:
        codec.encode(x)
    assert str(error.value).endswith(meant)


def test_a_mask_is_never_lost(codec):
    payload = codec.encode(np.zeros(N, np.float32))
    with pytest.raises(compll.UsageError, match="masked array"):
        codec.decode(np.ma.array(payload), N)


def test_numbers_of_tensors(codec):
    for wrong, told in ((-1, "-1 tensors"), (2.5, "tensors is a whole number, not 2.5")):
        with pytest.raises(compll.UsageError, match=told):
            codec.init_state(3, wrong)


@pytest.mark.parametrize("target", TARGETS)
def test_payloads_of_rounds(target):
    codec = compll.compile("powersgd", target)
    x, table, at = np.zeros(N, np.float32), np.array([[0, N, 0, 0, 0]]), np.zeros(1, np.int64)
    room = np.zeros(codec.rounds[0].payload_bytes(N), np.uint8)
    with pytest.raises(compll.UsageError, match="out is a contiguous uint8 vector"):
        codec.encode_round(0, x, table, room.view(np.float32), at, workers=2)
    with pytest.raises(compll.UsageError, match="payload of a round is a contiguous uint8 vector"):
        codec.encode_round(1, x, table, room, at, [(room.tolist(), at)], workers=2)


@pytest.mark.parametrize("n", [2**44, 2**63, 10**30])
def test_states_for_which_there_is_no_memory(n):
    with pytest.raises(compll.UsageError, match=f"onebit: there is no memory for {n} elements"):
        compll.compile("onebit", "reference").init_state(n)


@pytest.mark.parametrize("spec", [None, 3, ["onebit"]])
def test_an_unknown_spec_name_is_refused(spec):
    with pytest.raises(compll.UsageError, match="a spec is given by its name or path"):
        compll.compile(spec)


def test_a_name_may_be_bytes_as_paths_may():
    assert compll.compile(b"onebit", "reference").name == "onebit"
