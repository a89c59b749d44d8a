// attention_table.cpp: the arguments that are indexed by delta: the bias, and the relative table or
// its zones, which are packed for the kernels.
#include "attention.h"

namespace wavepe {

wpe_matrix_out Call::table_result(const Tensor &dp, int64_t h) const {
    const int64_t dim = dp.dim(), row_stride = dp.stride(dim - 2);
    const int64_t last_row = first_row + table.relative.rows - 1;
    return {at_mutable(dp, (dim > 2 ? h * dp.stride(0) : 0) + last_row * row_stride), -row_stride,
            last_stride(dp)};
}

wpe_matrix_out Call::bias_result(const Tensor &dbias, int64_t h) const {
    const int64_t stride = last_stride(dbias);
    return {at_mutable(dbias, (dbias.dim() > 1 ? h * dbias.stride(0) : 0) + first_value * stride),
            0, stride};
}

// Return the rows that some pair of query and key can read.
wpe_range Call::reached(int64_t rows, int64_t first_delta, int beyond) const {
    const auto [low, high] = std::minmax_element(offset.begin(), offset.end());
    int64_t least_delta = *low - (keys - 1), largest_delta = *high + queries - 1;
    if (given.causal) least_delta = std::max<int64_t>(least_delta, 0);
    if (given.window) largest_delta = std::min(largest_delta, *given.window - 1);
    return wpe_rows_read(rows, first_delta, beyond, least_delta, largest_delta);
}

// Clamp a delta to +-2^60. No key has a larger delta, and sums with it do not overflow.
int64_t within_limit(int64_t first_delta) {
    const int64_t limit = int64_t{1} << 60;
    return std::clamp(first_delta, -limit, limit);
}

void Call::read_bias() {
    const int64_t first_delta = within_limit(given.bias_first_delta);
    bias.beyond = beyond_code(given.bias_beyond, "bias_beyond");
    const wpe_range read = reached(last_size(*given.bias), first_delta, bias.beyond);
    first_value = read.begin;
    bias.first_delta = first_delta + read.begin;
    bias.rows = read.end - read.begin;
    bias.stride = last_stride(*given.bias);
    WPE_CHECK(bias.rows < ADDRESS_SPACE, "bias of shape ", shape_of(*given.bias), " is too large");
}

void Call::check_zones(int64_t rows) const {
    const std::vector<Tensor> &parts = *given.zones;
    WPE_CHECK(parts.size() % 2 == 0 && given.p->dim() == 2,
              "zones must be pairs of tensors beside a table (w, d), got ", parts.size());
    int64_t found = 0;
    for (size_t z = 0; z < parts.size(); z += 2) {
        const Tensor &c = parts[z], &u = parts[z + 1];
        check_same_dtype(given.q, "zones", c);
        check_same_dtype(given.q, "zones", u);
        const bool full = u.numel() == 0;
        WPE_CHECK(c.dim() == 2 &&
                      (full ? c.size(1) == table_size
                            : u.dim() == 2 && u.size(0) == table_size && u.size(1) == c.size(1)) &&
                      c.size(1) <= table_size,
                  "a zone must be (rows, rank) and (", table_size,
                  ", rank), with at most that rank,"
                  " got ",
                  shape_of(c), " and ", shape_of(u));
        WPE_CHECK(c.size(0) <= rows - found, "zones have more rows than the ", rows, " of p");
        found += c.size(0);
    }
    WPE_CHECK(found == rows, "zones have ", found, " rows, p has ", rows);
}

// A zone has a product with its basis first. So zones take fewer products than the rows of p when a
// query sees more than about a hundred keys on average. With the tables of wavelets that holds for
// head sizes of 32 to 128.
bool Call::reads_zones(int64_t keys) const {
    return has_zones() && keys > (given.causal ? 224 : 112);
}

void Call::read_table() {
    const Tensor &p = *given.p;
    const int64_t rows = p.size(p.dim() - 2), first_delta = within_limit(given.first_delta);
    wpe_relative &relative = table.relative;
    relative.beyond = beyond_code(given.beyond);
    const wpe_range read = reached(rows, first_delta, relative.beyond);
    if (read.begin == read.end) return;
    if (has_zones()) check_zones(rows);
    first_row = read.begin;
    relative.first_delta = first_delta + read.begin;
    relative.rows = read.end - read.begin;
    WPE_CHECK(relative.rows < ADDRESS_SPACE && head_bytes(relative.rows) < ADDRESS_SPACE,
              current_operator, ": p of shape ", shape_of(p), " is too large");
    // Add rows of c, whose row 0 is row `begin` of p.
    const auto add = [&](const Tensor &c, const Tensor *u, int64_t begin) {
        const int64_t dim = c.dim(), stride = c.stride(dim - 2);
        const int64_t first = std::max(read.begin, begin);
        const int64_t end = std::min(read.end, begin + c.size(dim - 2));
        if (first >= end) return;
        wpe_zone zone{};
        zone.rows = end - first;
        zone.rank = last_size(c);
        wpe_matrix basis{nullptr, 0, 0};
        if (u && u->numel()) basis = {at(*u, 0), u->stride(0), u->stride(1)};
        zone.basis = basis.data;
        zones.push_back(zone);
        sources.push_back({{at(c, (first - begin) * stride), stride, last_stride(c)}, basis});
    };
    if (reads_zones(keys)) {  // they come in rising delta, and zones are in falling delta
        const std::vector<Tensor> &parts = *given.zones;
        int64_t begin = rows;
        for (size_t z = parts.size(); z > 0; z -= 2) {
            begin -= parts[z - 2].size(0);
            add(parts[z - 2], &parts[z - 1], begin);
        }
    } else {
        add(p, nullptr, 0);
    }
    relative.zone_count = (int)zones.size();
    relative.zones = zones.data();
    table.sources = sources.data();
    table.columns = table_size;
    table.storage = storage;
}

void Call::pack_tables(wpe_pass pass) {
    const wpe_range rows = {0, table.relative.rows};
    if (!rows.end) return;
    const int64_t count = table_per_head() ? heads : 1;
    const int64_t each = wpe_table_bytes(kernels, &table, rows.end, pass);
    packed = std::make_shared<Memory>(count, each);
    tables.resize(count);
    packed_zones.resize(count * zones.size());
    run_tasks(count, 0, [&](int64_t h, char *) {
        tables[h] = wpe_pack_rows(kernels, &table, table_shift(h), rows,
                                  &packed_zones[h * zones.size()], packed->at(h * each), pass);
    });
}

}  // namespace wavepe
