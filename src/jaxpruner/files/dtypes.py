"""Element types: those of safetensors files, and those that packed files hold as whole numbers of the same bits."""

import ml_dtypes
import numpy as np

# By the names that safetensors files give them.
SAFETENSORS: dict[str, np.dtype] = {
    'BOOL': np.dtype('bool'),
    'U8': np.dtype('uint8'),
    'I8': np.dtype('int8'),
    'U16': np.dtype('uint16'),
    'I16': np.dtype('int16'),
    'U32': np.dtype('uint32'),
    'I32': np.dtype('int32'),
    'U64': np.dtype('uint64'),
    'I64': np.dtype('int64'),
    'F16': np.dtype('float16'),
    'BF16': np.dtype(ml_dtypes.bfloat16),
    'F32': np.dtype('float32'),
    'F64': np.dtype('float64'),
    'C64': np.dtype('complex64'),
    'F8_E4M3': np.dtype(ml_dtypes.float8_e4m3fn),
    'F8_E5M2': np.dtype(ml_dtypes.float8_e5m2),
    'F8_E8M0': np.dtype(ml_dtypes.float8_e8m0fnu),
}
_OTHERS = [
    np.dtype(getattr(ml_dtypes, name))
    for name in dir(ml_dtypes)
    if name.startswith(('int', 'uint', 'float'))
]
PACKED: dict[str, np.dtype] = {dtype.name: dtype for dtype in [*SAFETENSORS.values(), *_OTHERS]}


def stored_dtype(dtype: np.dtype) -> np.dtype:
    """Returns what a packed file holds in place of an element type: itself if all readers of the format know it."""
    is_of_numpy = dtype.isbuiltin == 1 and dtype.kind != 'c'
    if is_of_numpy or dtype == ml_dtypes.bfloat16:
        return dtype
    return np.dtype(f'uint{8 * dtype.itemsize}')
