"""Arrays of every library and protocol, as inputs and outputs; strides; what is refused."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
import types
import weakref

import ml_dtypes
import numpy as np
import pytest

import flash_kda
from api_support import BF16, F16, F32, assert_close, expected, problem, to_numpy, to_torch
from flash_kda import _arrays

# --- objects that speak DLPack in one way or another ----------------------------------------------


class Exporter:
    """An array object that offers nothing but DLPack, from a NumPy array (float32, ints)."""

    versioned = True

    def __init__(self, array):
        self.array = array

    @property
    def shape(self):
        return self.array.shape

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, max_version=None, stream=None):
        assert stream is None, "no stream on the CPU"
        return self.array.__dlpack__(max_version=max_version)


class OldExporter(Exporter):
    """From before DLPack 1.0: knows no max_version and gives an unversioned capsule."""

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", DLTensor),
    )  # fmt: skip


class HandMade:
    """A capsule of our own making: any device, dtype, flags, offset, missing strides."""

    def __init__(
        self, shape, data=0x1000, device=(1, 0), dtype=(2, 32), lanes=1, flags=0, strides=None,
        byte_offset=0, major=1, capsule_name=b"dltensor_versioned",
    ):  # fmt: skip
        self.shape = tuple(shape)
        self.streams = []
        self._name = capsule_name
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = None if strides is None else (ctypes.c_int64 * len(shape))(*strides)
        tensor = DLTensor(
            data, *device, len(shape), *dtype, lanes, self._shape, self._strides, byte_offset
        )
        self._managed = DLManagedTensorVersioned(major, 0, None, None, flags, tensor)

    def __dlpack_device__(self):
        return (self._managed.tensor.device_type, self._managed.tensor.device_id)

    def __dlpack__(self, *, max_version=None, stream=None):
        self.streams.append(stream)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = (
            ctypes.py_object,
            (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
        )
        return new(ctypes.addressof(self._managed), self._name, None)


def hand_made(array, **options):
    """A HandMade for a float32 NumPy array."""
    strides = [s // array.itemsize for s in array.strides]
    return HandMade(array.shape, array.ctypes.data, strides=strides, **options)


# --- each kind as input and output ----------------------------------------------------------------


@pytest.mark.parametrize("kind", [Exporter, OldExporter, hand_made], ids=lambda k: k.__name__)
def test_dlpack_objects(kind):
    p = problem(F32, lengths=[7, 30])
    exporters = p.mapped(lambda x: x if x.dtype == np.int64 and kind is hand_made else kind(x))
    exporters.fwd()
    o, final = expected(p)
    assert_close(p.out, o, F32)
    assert_close(p.final_state, final, F32)


def test_dlpack_object_with_caller_outputs_in_chunk_kda():
    p = problem(F32)
    e = p.mapped(Exporter)
    o, final = e.chunk_kda(out=e.out, final_state=e.final_state)
    assert o is e.out
    assert final is e.final_state
    assert_close(p.out, expected(p)[0], F32)
    with pytest.raises(TypeError, match="^v: .*pass out="):
        e.chunk_kda()


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("gate_dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("state_dtype", [BF16, F32], ids=str)
def test_numpy(dtype, gate_dtype, state_dtype):
    p = problem(dtype, gate_dtype=gate_dtype, state_dtype=state_dtype, lengths=[3, 20])
    p.fwd()
    o, final = expected(p)
    assert_close(p.out, o, dtype)
    assert_close(p.final_state, final, state_dtype)
    o2, final2 = p.chunk_kda()
    assert type(o2) is np.ndarray
    assert o2.dtype == dtype
    assert o2.tobytes() == p.out.tobytes()
    assert final2.dtype == F32
    assert_close(final2, final, F32)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_torch(dtype):
    torch = pytest.importorskip("torch")
    p = problem(dtype, lengths=[3, 20])
    t = p.mapped(to_torch)
    t.fwd()
    o, final = expected(p)
    assert_close(to_numpy(t.out), o, dtype)
    assert_close(to_numpy(t.final_state), final, F32)
    o2, final2 = t.chunk_kda()
    assert o2.dtype == t.v.dtype
    assert torch.equal(o2, t.out)
    assert torch.equal(final2, t.final_state)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("state_v_first", [True, False])
def test_jax(dtype, state_v_first):
    jax = pytest.importorskip("jax")
    p = problem(dtype, T=29)
    j = p.mapped(jax.numpy.asarray)
    options = {"state_v_first": state_v_first}
    if not state_v_first:
        options["initial_state"] = jax.numpy.swapaxes(j.initial_state, -1, -2)
    o, final = j.chunk_kda(**options)
    assert isinstance(o, jax.Array)
    assert isinstance(final, jax.Array)
    assert o.dtype == dtype
    want_o, want_final = expected(p)
    assert_close(o, want_o, dtype)
    assert_close(final if state_v_first else final.swapaxes(-1, -2), want_final, F32)


def test_jax_outputs_are_refused():
    jax = pytest.importorskip("jax")
    p = problem(F32)
    j = p.mapped(jax.numpy.asarray)
    with pytest.raises(ValueError, match="^out: .*read-only"):
        j.fwd()
    with pytest.raises(ValueError, match="^final_state: .*read-only"):
        j.chunk_kda(final_state=j.final_state)
    with pytest.raises(TypeError, match="^[qv]: expected an array"):
        jax.jit(lambda q: flash_kda.fwd(q, q, q, q, q[..., 0], None, p.out, None, None, -5.0))(j.q)


def test_jax_inputs_with_numpy_outputs():
    jax = pytest.importorskip("jax")
    p = problem(BF16)
    j = p.mapped(jax.numpy.asarray)
    j.out, j.final_state = p.out, p.final_state
    j.fwd()
    assert_close(p.out, expected(p)[0], BF16)


def test_libraries_mix():
    pytest.importorskip("torch")
    p = problem(F32, lengths=[3, 20])
    mixed = p.mapped(lambda x: x)
    mixed.q, mixed.g, mixed.initial_state = to_torch(p.q), to_torch(p.g), to_torch(p.initial_state)
    mixed.k, mixed.cu_seqlens = Exporter(p.k), Exporter(p.cu_seqlens)
    mixed.fwd()
    assert_close(p.out, expected(p)[0], F32)


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_offset_dtypes(index_dtype):
    p = problem(F32, lengths=[3, 0, 20])
    want = expected(p)[0]
    p.cu_seqlens = p.cu_seqlens.astype(index_dtype)
    p.fwd()
    assert_close(p.out, want, F32)


def test_subclasses_and_read_only_inputs(tmp_path):
    p = problem(BF16)
    want = expected(p)
    p.q.tofile(tmp_path / "q")
    p.q = np.memmap(tmp_path / "q", BF16, mode="r", shape=p.q.shape)
    for name in ("k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"):
        getattr(p, name).flags.writeable = False
    p.fwd()
    assert_close(p.out, want[0], BF16)
    assert_close(p.final_state, want[1], F32)


# --- strides --------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_slices_of_one_projection(library):
    """q, k, v, g as column blocks of one matrix, beta with a row pitch of 6288 elements."""
    if library == "torch":
        pytest.importorskip("torch")
    dense = problem(F32, B=1, T=50, H=2, HV=2, K=16, V=16)
    want = expected(dense)
    rows = np.full((1, 50, 6288), np.nan, np.float32)
    columns = {"q": 8, "k": 40, "v": 72, "g": 104, "beta": 6200}
    strided = dense.mapped(lambda x: x if library == "numpy" else to_torch(x))
    matrix = rows if library == "numpy" else to_torch(rows)
    for name, start in columns.items():
        x = getattr(strided, name)
        width = 1
        for size in x.shape[2:]:
            width *= size
        block = matrix[:, :, start : start + width]
        block[:] = x.reshape(1, 50, width)
        view = block.reshape(1, 50, 2, -1) if x.ndim == 4 else block
        if library == "numpy":
            assert np.shares_memory(view, matrix)
        setattr(strided, name, view)
    strided.fwd()
    assert_close(to_numpy(strided.out), want[0], F32)
    assert_close(to_numpy(strided.final_state), want[1], F32)


def test_strided_output_leaves_its_neighbours():
    p = problem(F32)
    wide = np.full((2, 37, 4, 2, 16), 7.0, np.float32)
    p.out = wide[:, :, :, 1]
    p.fwd()
    assert_close(p.out, expected(p)[0], F32)
    assert (wide[:, :, :, 0] == 7).all()


def test_negative_and_zero_strides():
    p = problem(F32)
    p.q = p.q[:, ::-1]
    p.k = np.broadcast_to(p.k[:, :1], p.k.shape)
    p.beta = p.beta[::-1]
    p.fwd()
    assert_close(p.out, expected(p)[0], F32)


def test_strides_of_single_element_dimensions_mean_nothing():
    torch = pytest.importorskip("torch")
    p = problem(F32, B=1, H=1, HV=1)
    t = p.mapped(to_torch)
    t.q = torch.as_strided(t.q, t.q.shape, (999, t.q.stride(1), 3, 1))
    t.out = torch.as_strided(t.out, t.out.shape, (7, t.out.stride(1), 12345, 1))
    t.fwd()
    assert_close(t.out.numpy(), expected(p)[0], F32)


def test_two_byte_alignment():
    p = problem(BF16)
    want = expected(p)
    for name in ("q", "k", "v", "out"):
        x = getattr(p, name)
        shifted = np.empty(x.size + 1, BF16)[1:].reshape(x.shape)
        shifted[...] = x
        assert shifted.ctypes.data % 4 == 2
        setattr(p, name, shifted)
    p.fwd()
    assert_close(p.out, want[0], BF16)


def test_strides_beyond_32_bits():
    """A head stride of 2^31 elements and more, in memory that is only reserved."""
    p = problem(BF16, B=1, T=6, H=2, HV=2)
    want = expected(p)
    pitch = 2**31 + 8
    try:
        sparse = np.empty(pitch + 6 * 24, BF16)
    except MemoryError:
        pytest.skip("this machine does not reserve 4 GiB")
    view = np.lib.stride_tricks.as_strided(sparse, (1, 6, 2, 24), (0, 24 * 2, pitch * 2, 2))
    view[...] = p.q
    p.q = view
    p.fwd()
    assert_close(p.out, want[0], BF16)


# --- what is refused ------------------------------------------------------------------------------


def refuse(name, value, error, text, **options):
    p = problem(F32, **options)
    good = problem(F32, **options)
    setattr(p, name, value(getattr(p, name)) if callable(value) else value)
    with pytest.raises(error, match=text):
        p.fwd()
    good.fwd()
    assert_close(good.out, expected(good)[0], F32)


@pytest.mark.parametrize("name", ["out", "final_state"])
@pytest.mark.parametrize(
    "freeze",
    [
        lambda x: np.lib.stride_tricks.as_strided(x, writeable=False),
        lambda x: hand_made(x, flags=1),
        lambda x: np.broadcast_to(x[:1], x.shape),
    ],
    ids=["numpy", "dlpack flag", "broadcast"],
)
def test_read_only_outputs(name, freeze):
    refuse(name, freeze, ValueError, f"^{name}: .*(read-only|of its own)")


@pytest.mark.parametrize(
    "name", ["q", "k", "v", "g", "beta", "out", "A_log", "dt_bias", "initial_state"]
)
@pytest.mark.parametrize(
    "dtype",
    ["float64", "int8", "uint8", "bool", "complex64", "float128", "datetime64[s]", "U2", "O"],
)
def test_dtypes(name, dtype):
    shown = np.dtype(dtype).name
    pattern = f"^{name}: .*({re.escape(shown)}|{re.escape(str(np.dtype(dtype)))})"
    refuse(name, lambda x: np.zeros(x.shape, dtype), ValueError, pattern)


@pytest.mark.parametrize(
    "dtype",
    [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4],
    ids=lambda d: d.__name__,
)
def test_other_ml_dtypes(dtype):
    refuse("v", lambda x: np.zeros(x.shape, dtype), ValueError, f"^v: .*{dtype.__name__}")


def test_two_byte_types_that_are_not_bfloat16():
    refuse("q", lambda x: np.zeros(x.shape, "V2"), ValueError, r"^q: .*\|V2")
    refuse("q", lambda x: np.zeros(x.shape, [("a", "u1"), ("b", "u1")]), ValueError, "^q: ")


def test_byte_order_and_layout_within_elements():
    refuse("q", lambda x: x.astype(">f4"), ValueError, "^q: .*byte order")
    raw = np.zeros(2 * 37 * 2 * 24 * 4 + 1, np.uint8)
    refuse("q", lambda x: raw[1:].view(np.float32).reshape(x.shape), ValueError, "^q: .*aligned")
    packed = np.zeros((2, 37, 2, 24), np.dtype([("x", "<f4"), ("pad", "u1")]))
    refuse("q", lambda x: packed["x"], ValueError, "^q: ")


def test_masked_arrays():
    refuse("v", lambda x: np.ma.masked_array(x, x > 0), TypeError, "^v: .*MaskedArray")


def test_rank():
    refuse("q", lambda x: np.zeros((1,) * 9, np.float32), ValueError, "^q: .*8 dimensions, got 9")
    refuse("q", lambda x: HandMade([1] * 40), ValueError, "^q: .*8 dimensions, got 40")
    refuse("q", lambda x: np.float32(1), ValueError, "^q: ")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"device": (10, 3)}, NotImplementedError, "^q: .*device type 10:3"),
        ({"dtype": (1, 8)}, ValueError, "^q: .*uint8"),
        ({"dtype": (6, 8)}, ValueError, "^q: .*bool"),
        ({"dtype": (5, 64)}, ValueError, "^q: .*complex64"),
        ({"dtype": (10, 8)}, ValueError, "^q: .*type code 10"),
        ({"lanes": 4}, ValueError, "^q: .*float32 x 4"),
        ({"major": 2}, ValueError, "^q: .*major version 2"),
        ({"capsule_name": b"other"}, ValueError, "^q: .*no DLPack capsule"),
        ({"data": None}, ValueError, "^q: "),
    ],
    ids=str,
)
def test_dlpack_capsules(options, error, text):
    refuse("q", lambda x: HandMade(x.shape, **options), error, text)


def test_dlpack_without_strides_and_with_an_offset():
    p = problem(F32)
    want = expected(p)
    buffer = np.concatenate([np.full(16, np.nan, np.float32), p.q.ravel()])
    p.q = HandMade(p.q.shape, buffer.ctypes.data, byte_offset=64)
    p.fwd()
    assert_close(p.out, want[0], F32)


def test_errors_of_the_exporter_are_told():
    class Broken(Exporter):
        def __dlpack__(self, **options):
            raise BufferError("the buffer is gone")

    refuse("k", lambda x: Broken(x), ValueError, "^k: .*Broken.*the buffer is gone")


def test_cuda_array_gets_the_stream_and_an_error_that_says_why():
    """Without CUDA in this build the call is refused, after the exporter was asked for stream 1."""
    if any(b.name != "cpu" and b.available for b in flash_kda.backends()):
        pytest.skip("this build would launch on the made-up pointers")
    p = problem(F32)
    arrays = p.mapped(lambda x: HandMade(x.shape, device=(2, 0)))
    arrays.q = HandMade(p.q.shape, device=(2, 0), dtype=(4, 16))
    for name in ("k", "v", "out"):
        setattr(arrays, name, HandMade(getattr(p, name).shape, device=(2, 0), dtype=(4, 16)))
    with pytest.raises((NotImplementedError, ValueError), match="cuda:0"):
        arrays.fwd()
    assert arrays.q.streams == [1]


@pytest.mark.parametrize("package", ["cupy", "jax", "jaxlib"])
def test_stream_is_that_of_a_library_that_has_one(package, monkeypatch):
    """CuPy's current stream on the arrays' device; JAX has none, so there it is `out`'s."""
    if any(b.name != "cpu" and b.available for b in flash_kda.backends()):
        pytest.skip("this build would launch on the made-up pointers")
    asked = []

    def get_current_stream(device):
        asked.append(device)
        return types.SimpleNamespace(ptr=0x770)

    cupy = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace(get_current_stream=get_current_stream)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    members = {"dtype": np.dtype(F32), "view": lambda self, _: self}
    of = {n: type(n, (HandMade,), {"__module__": n, **members}) for n in ("cupy", package)}
    p = problem(BF16, K=128, V=128, gate_dtype=BF16)

    def made(x, kind):
        dtype = (4, 16) if x.dtype == BF16 else (2, 32)
        return kind(x.shape, x.ctypes.data, device=(2, 3), dtype=dtype)  # never read

    arrays = p.mapped(lambda x: made(x, of[package]))
    arrays.out, arrays.final_state = made(p.out, of["cupy"]), made(p.final_state, of["cupy"])
    with pytest.raises((NotImplementedError, RuntimeError), match="cuda|CUDA"):
        arrays.fwd()
    assert asked == [3]
    for name in ("q", "v", "out", "initial_state", "final_state"):
        assert getattr(arrays, name).streams == [0x770]


def test_one_call_on_two_devices():
    refuse("k", lambda x: HandMade(x.shape, device=(2, 1)), ValueError, "^k: .*cpu")


# --- memory ---------------------------------------------------------------------------------------


def test_exports_are_given_back():
    p = problem(F32)
    exporter = Exporter(p.q)
    before = sys.getrefcount(exporter.array)
    p.q = exporter
    for _ in range(5):
        p.fwd()
    gc.collect()
    assert sys.getrefcount(exporter.array) == before


def test_array_types_may_come_and_go():
    """The table of types has an end: types made in a loop are let go again."""
    alive = []
    p = problem(F32, T=2)
    array = p.q
    for _ in range(600):
        kind = type("Exporter", (Exporter,), {})
        alive.append(weakref.ref(kind))
        p.q = kind(array)
        p.fwd()
    del kind
    p.q = array
    gc.collect()
    assert sum(ref() is not None for ref in alive) < 300


def test_cupy_allocations_stay_on_the_arrays_device(monkeypatch):
    """CuPy itself needs a GPU; here a module of its name with NumPy's functions stands in."""
    entered = []

    class Device:
        def __enter__(self):
            entered.append(True)

        def __exit__(self, *_):
            pass

    cupy = types.ModuleType("cupy")
    cupy.empty = np.empty
    array_type = type("ndarray", (), {"__module__": "cupy", "__dlpack__": None})
    like = array_type()
    like.device, like.dtype = Device(), F32
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    library = _arrays.library_of("q", like)
    assert library.empty(like, (2, 3)).shape == (2, 3)
    assert library.empty_float32(like, (4,)).dtype == np.float32
    assert library.empty_bytes(like, 5).dtype == np.uint8
    assert len(entered) == 3


def test_bfloat16_of_cupy():
    """A stand-in as CuPy is: bfloat16 is ml_dtypes' and DLPack refuses it; a view of it goes."""

    class ndarray(Exporter):  # noqa: N801
        __module__ = "cupy"

        @property
        def dtype(self):
            return self.array.dtype

        def view(self, dtype):
            return ndarray(self.array.view(dtype))

        def __dlpack__(self, *, max_version=None, stream=None):
            if self.array.dtype == BF16:
                raise BufferError("dtype is not supported for dlpack export")
            return self.array.__dlpack__(max_version=max_version)

        def __dlpack_device__(self):
            return (1, 0)

    p = problem(BF16, lengths=[7, 30], state_dtype=BF16)
    p.mapped(ndarray).fwd()
    o, final = expected(p)
    assert_close(p.out, o, BF16)
    assert_close(p.final_state, final, BF16)


def test_workspace_comes_from_the_library_of_q():
    """The path of libraries without the exchange API; a CPU call itself needs none."""
    x = np.zeros((2, 3), np.float32)
    assert _arrays._allocate_workspace(x, 100).nbytes == 100
    with pytest.raises(NotImplementedError, match="^q: .*100 bytes.*Exporter"):
        _arrays._allocate_workspace(Exporter(x), 100)
