from numpy import ndarray, ufunc

gaussian: ufunc
haar: ufunc
morlet: ufunc
ricker: ufunc

rope: ufunc
rope_bf16: ufunc
rope_table: ufunc
wavelet_table: ufunc

ATTENTION_QUERY_BLOCK: int

def kernels() -> object: ...
def relative_bias(
    kernels: object,
    q: ndarray,
    p: ndarray,
    out: ndarray,
    first: int,
    beyond: int,
    /,
) -> None: ...
def attention(
    kernels: object,
    q: ndarray,
    k: ndarray,
    v: ndarray,
    p: ndarray | None,
    q_rel: ndarray | None,
    slopes: ndarray | None,
    bias: ndarray | None,
    sinks: ndarray | None,
    out: ndarray,
    lse: ndarray,
    scale: float,
    first: int,
    beyond: int,
    bias_first: int,
    bias_beyond: int,
    causal: bool,
    window: int,
    begin: int,
    end: int,
    /,
) -> None: ...
def compiler() -> str: ...
def flags() -> str: ...
def cuda_archs() -> str: ...
def use_variant(name: str, /) -> bool: ...
def variant() -> str: ...
def variants() -> list[str]: ...
