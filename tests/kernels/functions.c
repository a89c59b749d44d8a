/* functions.c: the functions inside the kernels, as functions of arrays. */
typedef int nothing_yet;
