/* check_attention_bench.c: cycles per pair of a query and a key that it sees. */
#include "attention_call.h"

#include <string.h>

enum { LENGTH = 480, SIZE = 64 };

typedef struct {
    attention_call c;
    array out, lse, sums;
    const wpe_kernels *prepared_by;
    prepared p;
} attention_bench;

static array new_random(int64_t rows, int64_t cols) {
    array x = new_dense(WPE_F32, rows, cols, 1);
    fill_normal(&x, 1);
    return x;
}

static void begin_bench(attention_bench *b, enum wpe_pass pass, int has_table) {
    memset(b, 0, sizeof *b);
    attention_call *c = &b->c;
    wpe_attention *a = &c->a[0];
    c->pass = pass;
    c->storage = c->own = a->storage = WPE_F32;
    c->heads = 1;
    a->queries = pass == WPE_DECODE ? 1 : LENGTH;
    a->keys = a->end_key = LENGTH;
    a->offset = a->keys - a->queries;
    a->head_size = a->value_size = SIZE;
    a->scale = 0.125;
    a->causal = 1;
    a->window = INT64_C(1) << 60;
    c->q[0] = new_random(a->queries, SIZE);
    c->k = new_random(LENGTH, SIZE);
    c->v = new_random(LENGTH, SIZE);
    a->q = matrix_of(&c->q[0]);
    a->k = matrix_of(&c->k);
    a->v = matrix_of(&c->v);
    b->out = new_random(a->queries, SIZE);
    b->lse = new_random(a->queries, 1);
    if (!has_table) return;
    a->relative = &c->table.relative;
    c->table.relative = (wpe_relative){.rows = LENGTH, .zone_count = pass != WPE_DECODE};
    c->table.zones[0] = (wpe_zone){.rows = LENGTH, .rank = SIZE};
    c->table.rows[0] = c->table.dense = new_random(LENGTH, SIZE);
}

static int is_prepared(attention_bench *b, const wpe_kernels *k) {
    if (b->prepared_by != k && !prepare(k, &b->c, (packing){0, 0}, &b->p)) return 0;
    b->prepared_by = k;
    return 1;
}

static void call_forward(const wpe_kernels *k, void *context) {
    attention_bench *b = context;
    if (!is_prepared(b, k)) return;
    k->attention[0].forward(&b->c.a[0], b->p.packed.data, matrix_out_of(&b->out), b->lse.data, 0,
                            LENGTH, b->p.workspace.data);
}

static void call_decode(const wpe_kernels *k, void *context) {
    attention_bench *b = context;
    const wpe_matrix none = {NULL, 0, 0};
    if (!is_prepared(b, k)) return;
    k->attention[0].decode(&b->c.a[0], b->c.a[0].relative ? matrix_of(&b->c.table.dense) : none,
                           matrix_out_of(&b->out), b->lse.data, b->p.workspace.data);
}

static void call_backward(const wpe_kernels *k, void *context) {
    attention_bench *b = context;
    if (!is_prepared(b, k)) return;
    const wpe_attention_sizes *s = &b->p.sizes;
    wpe_attention_gradients g = {.out = matrix_of(&b->out), .grad_out = b->c.a[0].v};
    g.lse = b->lse.data;
    g.dq = matrix_out_of(&b->out);
    float *sums = b->sums.data; /* they grow without end, which costs nothing */
    g.sums.dk = sums;
    g.sums.dv = sums + s->dk_rows * s->dk_cols;
    if (b->c.a[0].relative) g.sums.dp = sums + 2 * s->dk_rows * s->dk_cols;
    k->attention[0].backward(&b->c.a[0], b->p.packed.data, &g, 0, LENGTH, b->p.workspace.data);
}

void bench_attention(void) {
    attention_bench b;
    const double pairs = LENGTH * (LENGTH + 1) / 2.0;
    begin_bench(&b, WPE_FORWARD, 0);
    bench("attention f32 480 x 64, a pair", pairs, call_forward, &b);
    begin_bench(&b, WPE_FORWARD, 1);
    bench("attention f32 480 x 64 with a table, a pair", pairs, call_forward, &b);
}

void bench_attention_backward(void) {
    attention_bench b;
    const double pairs = LENGTH * (LENGTH + 1) / 2.0;
    for (int has_table = 0; has_table < 2; has_table++) {
        begin_bench(&b, WPE_BACKWARD, has_table);
        b.sums = new_block(WPE_F32, 3 * (LENGTH + 64) * (SIZE + 64));
        memset(b.sums.data, 0, (size_t)count_of(&b.sums) * sizeof(float));
        for (int64_t i = 0; i < LENGTH; i++) put(&b.lse, i, 0, 0, 6);
        bench(has_table ? "backward f32 480 x 64 with a table, a pair"
                        : "backward f32 480 x 64, a pair",
              pairs, call_backward, &b);
    }
}

void bench_attention_decode(void) {
    attention_bench b;
    begin_bench(&b, WPE_DECODE, 0);
    bench("decode f32 480 x 64, a key", LENGTH, call_decode, &b);
    begin_bench(&b, WPE_DECODE, 1);
    bench("decode f32 480 x 64 with a table, a key", LENGTH, call_decode, &b);
}
