"""Element types: their names, their bits, and the types that files hold in their place.

Files hold whole numbers, booleans and the floats of 16 to 64 bits. Types that readers of the format lack (float8, int4,
complex) are stored as unsigned whole numbers of the same bits.
"""

import ml_dtypes
import numpy as np

_NUMPY_NAMES = """
    bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128
""".split()
_ML_NAMES = """
    bfloat16 int2 int4 uint2 uint4 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz
    float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float6_e2m3fn float6_e3m2fn float4_e2m1fn
""".split()

DTYPES = {name: np.dtype(name) for name in _NUMPY_NAMES}
for _name in _ML_NAMES:
    if hasattr(ml_dtypes, _name):  # older releases have fewer
        DTYPES[_name] = np.dtype(getattr(ml_dtypes, _name))
_STORED_AS_THEY_ARE = frozenset([*_NUMPY_NAMES, 'bfloat16']) - {'complex64', 'complex128'}
_WIDEST_NUMBER = 8  # bytes


def dtype_named(name: object) -> np.dtype:
    """Returns the element type of a name.

    Raises:
      ValueError: there is none.
    """
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f'its dtype {name!r} is unknown; known are {", ".join(DTYPES)}')
    return DTYPES[name]


def stored_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the type that a file holds in place of an element type."""
    if dtype.name in _STORED_AS_THEY_ARE:
        return dtype
    return _whole_number_dtype(dtype)


def _whole_number_dtype(dtype: np.dtype) -> np.dtype:
    """The unsigned whole numbers of the same bits; one element may take several."""
    width = min(dtype.itemsize, _WIDEST_NUMBER)
    return np.dtype(f'uint{8 * width}')


def stored_shape(shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...]:
    """Returns the shape of an array in a file: complex128 takes two numbers, along one more axis."""
    numbers = dtype.itemsize // stored_dtype(dtype).itemsize
    return shape if numbers == 1 else (*shape, numbers)


def to_stored(array: np.ndarray) -> np.ndarray:
    """Returns an array as a file holds it."""
    array = np.asarray(array, order='C')
    numbers = array[..., None]
    numbers = numbers.view(stored_dtype(array.dtype))
    shape = stored_shape(array.shape, array.dtype)
    return numbers.reshape(shape)


def from_stored(numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns the array of which `to_stored` made these numbers."""
    if stored_dtype(dtype).itemsize == dtype.itemsize:
        numbers = numbers[..., None]
    elements = numbers.view(dtype)
    return elements[..., 0]


def is_not_plus_zero(array: np.ndarray) -> np.ndarray:
    """Whether each element has a bit that is set: -0.0 and NaN have."""
    array = np.asarray(array, order='C')
    bits = array[..., None]
    bits = bits.view(_whole_number_dtype(array.dtype))
    *_, numbers = bits.shape
    if numbers == 1:
        return bits[..., 0] != 0
    return np.any(bits != 0, axis=-1)
