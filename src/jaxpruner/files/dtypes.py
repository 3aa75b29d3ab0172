"""Element types: those of safetensors files, and those that packed files hold as whole numbers of the same bits."""

import ml_dtypes
import numpy as np

# By the names that safetensors files give them.
_NAMES = {'BOOL': 'bool', 'F16': 'float16', 'F32': 'float32', 'F64': 'float64', 'C64': 'complex64'}
_NAMES |= {f'U{bits}': f'uint{bits}' for bits in (8, 16, 32, 64)}
_NAMES |= {f'I{bits}': f'int{bits}' for bits in (8, 16, 32, 64)}
SAFETENSORS = {name: np.dtype(of_numpy) for name, of_numpy in _NAMES.items()}
SAFETENSORS |= {
    'BF16': np.dtype(ml_dtypes.bfloat16),
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
