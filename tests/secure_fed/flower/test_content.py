"""The content of a Flower message: the contents that are accepted, and those refused before any array is created."""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any

import hypothesis
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import strategies as st

from secure_fed.deployment.envelope import DTYPES, Envelope, EnvelopeError
from secure_fed.flower.carrier import packed, unpacked

ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "masked": np.arange(6, dtype=np.uint32).reshape(2, 3),
    "turned": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "scalar": np.array(2.5, np.float16),
    "nothing": np.zeros((0, 4), np.int64),
    "signs": np.array([True, False]),
}
BOOL = DTYPES.index(np.dtype(np.bool_))


def record(data: bytes, stype: str = "secure-fed.envelope") -> RecordDict:
    """A message with these bytes, as a sender may write it without `packed`."""
    return RecordDict({"envelope": ArrayRecord({"bytes": Array("uint8", (len(data),), stype, data)})})


def content_of(envelope: Envelope) -> bytes:
    return packed(envelope).array_records["envelope"]["bytes"].data


def one_array(kind: int, shape: tuple[int, ...], numbers: bytes = b"") -> bytes:
    """The bytes of an envelope with one array, whose header may state any type and shape."""
    head = struct.pack("<I2sI", 2, b"{}", 1) + struct.pack("<H1sBB", 1, b"a", kind, len(shape))
    return head + struct.pack(f"<{len(shape)}Q", *shape) + numbers


def test_an_envelope_comes_back_as_it_was() -> None:
    found = unpacked(packed(Envelope(b'{"kind":"stage"}', ARRAYS)))
    assert found.header == b'{"kind":"stage"}'
    assert list(found.arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert (found.arrays[name].dtype, found.arrays[name].shape) == (array.dtype, array.shape), name
        assert np.array_equal(found.arrays[name], array), name


def test_an_envelope_without_arrays_comes_back() -> None:
    assert unpacked(packed(Envelope(b"{}"))) == Envelope(b"{}", {})


def test_all_arrays_are_one_of_flowers() -> None:
    content = packed(Envelope(b"{}", ARRAYS))
    assert [list(one) for one in content.array_records.values()] == [["bytes"]]


def test_a_message_is_read_to_its_last_byte_and_no_further() -> None:
    whole = content_of(Envelope(b"{}", ARRAYS))
    for end in range(len(whole)):
        with pytest.raises(EnvelopeError, match="shorter than"):
            unpacked(record(whole[:end]))
    with pytest.raises(EnvelopeError, match="goes on"):
        unpacked(record(whole + b"\0"))


def test_a_size_that_is_only_stated_is_not_made() -> None:
    """The stated size is within the limits of an envelope, but larger than the message."""
    with pytest.raises(EnvelopeError, match=f"above {len(one_array(0, (1,)))}"):
        unpacked(record(one_array(0, (10**9,))))


def test_a_shape_beyond_numpy_is_refused() -> None:
    with pytest.raises(EnvelopeError, match="shape"):
        unpacked(record(one_array(0, (0, 2**63, 2**63))))


def test_a_truth_value_is_0_or_1() -> None:
    assert unpacked(record(one_array(BOOL, (2,), b"\0\1"))).arrays["a"].tolist() == [False, True]
    with pytest.raises(EnvelopeError, match="truth"):
        unpacked(record(one_array(BOOL, (2,), b"\0\7")))


class Planted:
    """Fails the test when it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was loaded",)


def test_no_pickle_and_no_file_of_numpys_is_parsed() -> None:
    file = io.BytesIO()
    np.save(file, np.array([Planted()], dtype=object), allow_pickle=True)
    for data in (file.getvalue(), pickle.dumps(Planted())):
        for stype in ("secure-fed.envelope", "numpy.ndarray"):
            with pytest.raises(EnvelopeError):
                unpacked(record(data, stype))


def test_an_array_of_objects_is_not_sent() -> None:
    with pytest.raises(EnvelopeError, match="object"):
        packed(Envelope(b"{}", {"a": np.array([Planted()], dtype=object)}))


GOOD = packed(Envelope(b"{}"))
FOREIGN = {
    "empty": RecordDict(),
    "another record": RecordDict({**GOOD, "more": ConfigRecord({"a": 1})}),
    "a configuration": RecordDict({"envelope": ConfigRecord({"bytes": b"{}"})}),
    "no array": RecordDict({"envelope": ArrayRecord()}),
    "two arrays": RecordDict({"envelope": ArrayRecord(dict.fromkeys(("bytes", "b"), GOOD["envelope"]["bytes"]))}),
    "a file of numpy's": record(content_of(Envelope(b"{}")), "numpy.ndarray"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_message_of_another_kind_is_refused(case: str) -> None:
    with pytest.raises(EnvelopeError, match="not one of secure-fed's"):
        unpacked(FOREIGN[case])


CASES = st.binary(max_size=60) | st.builds(
    one_array,
    st.integers(0, 255),
    st.lists(st.integers(0, 5) | st.sampled_from([2**31, 2**40, 2**63, 2**64 - 1]), max_size=9).map(tuple),
    st.binary(max_size=60),
)


@hypothesis.given(data=CASES)
def test_whatever_comes_is_an_envelope_or_refused(data: bytes) -> None:
    try:
        found = unpacked(record(data))
    except EnvelopeError:
        return
    assert content_of(found) == data
