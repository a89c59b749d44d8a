/* check_attention_bench.c: measure attention's cycles per seen pair of query and key. */
#include "attention_call.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { LENGTH = 480, SIZE = 64 };

typedef struct {
    attention_call c;
    array out, lse, dq, sums;
    const wpe_kernels *prepared_by;
    prepared p;
} attention_bench;

static array new_random(int64_t rows, int64_t cols) {
    array x = new_dense(WPE_F32, rows, cols, 1);
    fill_normal(&x, 1);
    return x;
}

/* The term that is added to the products q . k. */
enum added { NOTHING, TABLE, SLOPE, BIAS };
static const char *const added_names[] = {"", " with a table", " with a slope", " with a bias"};

static void begin_bench(attention_bench *b, enum wpe_pass pass, int decodes, enum added added) {
    memset(b, 0, sizeof *b);
    attention_call *c = &b->c;
    wpe_attention *a = &c->a[0];
    c->pass = pass;
    c->decodes = decodes;
    c->storage = c->compute_type = a->storage = WPE_F32;
    c->heads = a->group = 1;
    a->queries = decodes ? 1 : LENGTH;
    a->keys = a->end_key = LENGTH;
    a->offset = a->keys - a->queries;
    a->head_size = a->value_size = a->table_size = SIZE;
    a->scale = 0.125;
    a->sink = -INFINITY;
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
    b->dq = new_random(a->queries, SIZE);
    if (added == SLOPE) a->slope = 0.01;
    if (added == BIAS) {
        c->bias[0] = new_random(LENGTH, 1);
        a->bias = (wpe_delta_bias){.values = c->bias[0].data, .rows = LENGTH, .stride = 1};
    }
    if (added != TABLE) return;
    a->relative = &c->table.relative;
    c->table.relative = (wpe_relative){.rows = LENGTH, .zone_count = 1};
    c->table.zones[0] = (wpe_zone){.rows = LENGTH, .rank = SIZE};
    c->table.rows[0] = new_random(LENGTH, SIZE);
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
    attention_call *c = &b->c;
    if (b->prepared_by != k) {
        if (!pack_table(k, c, b->p.zones)) return;
        const wpe_decode_sizes sizes = k->attention[0].decode_sizes(&c->a[0], 1);
        b->p.workspace = new_block(WPE_F32, sizes.workspace);
        b->p.packed = new_block(WPE_F32, sizes.sums);
    }
    b->prepared_by = k;
    k->attention[0].decode(&c->a[0], 1, 0, LENGTH, b->p.packed.data, b->p.workspace.data);
    k->attention[0].merge(&c->a[0], b->p.packed.data, 1, 0, matrix_out_of(&b->out), b->lse.data);
}

static void call_backward(const wpe_kernels *k, void *context) {
    attention_bench *b = context;
    if (!is_prepared(b, k)) return;
    const wpe_attention_sizes *s = &b->p.sizes;
    wpe_attention_gradients g = {.out = matrix_of(&b->out), .grad_out = b->c.a[0].v};
    g.lse = b->lse.data;
    g.dq = matrix_out_of(&b->dq);
    float *sums = b->sums.data; /* never cleared: they grow with each call, which costs no time */
    g.sums.dk = sums;
    g.sums.dv = sums + s->dk_rows * s->dk_cols;
    if (b->c.a[0].relative) g.sums.dp = sums + 2 * s->dk_rows * s->dk_cols;
    if (b->c.a[0].bias.rows) g.sums.dbias = sums + 2 * s->dk_rows * s->dk_cols;
    k->attention[0].backward(&b->c.a[0], b->p.packed.data, &g, 0, LENGTH, b->p.workspace.data);
}

static void bench_each(const char *name, enum wpe_pass pass, int decodes, double units,
                       bench_call *call) {
    attention_bench b;
    char text[80];
    for (int added = NOTHING; added <= BIAS; added++) {
        begin_bench(&b, pass, decodes, (enum added)added);
        b.sums = new_block(WPE_F32, 3 * (LENGTH + 64) * (SIZE + 64));
        memset(b.sums.data, 0, (size_t)count_of(&b.sums) * sizeof(float));
        for (int64_t i = 0; i < b.c.a[0].queries; i++) put(&b.lse, i, 0, 0, 6);
        snprintf(text, sizeof text, "%s%s", name, added_names[added]);
        bench(text, units, call, &b);
    }
}

void bench_attention(void) {
    bench_each("attention f32 480 x 64, a pair", WPE_FORWARD, 0, LENGTH * (LENGTH + 1) / 2.0,
               call_forward);
}

void bench_attention_backward(void) {
    bench_each("backward f32 480 x 64, a pair", WPE_BACKWARD, 0, LENGTH * (LENGTH + 1) / 2.0,
               call_backward);
}

void bench_attention_decode(void) {
    bench_each("decode f32 480 x 64, a key", WPE_FORWARD, 1, LENGTH, call_decode);
}
