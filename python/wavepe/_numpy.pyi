from numpy import ufunc

gaussian: ufunc
haar: ufunc
morlet: ufunc
ricker: ufunc

relative_bias: ufunc
rope: ufunc
rope_bf16: ufunc
rope_table: ufunc
wavelet_table: ufunc

def compiler() -> str: ...
def flags() -> str: ...
def use_variant(name: str, /) -> None: ...
def variant() -> str: ...
def variants() -> list[str]: ...
