// attention_table.cpp: the arguments that are indexed by delta: the bias, and the relative table or
// its zones, which are packed for the kernels.
#include "attention.h"

namespace wavepe {

wpe_matrix Call::table(int64_t h) const {
    if (!relative.rows) return {nullptr, 0, 0};
    const Tensor &p = *given.p;
    const int64_t dim = p.dim(), row_stride = p.stride(dim - 2);
    return {at(p, (dim > 2 ? h * p.stride(0) : 0) + first_row * row_stride), row_stride,
            last_stride(p)};
}

wpe_matrix_out Call::table_result(const Tensor &dp, int64_t h) const {
    const int64_t dim = dp.dim(), row_stride = dp.stride(dim - 2);
    const int64_t last_row = first_row + relative.rows - 1;
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
    return reached_rows(rows, first_delta, least_delta, largest_delta, beyond);
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
    bias.rows = std::max<int64_t>(read.end - read.begin, 0);
    bias.stride = last_stride(*given.bias);
    WPE_CHECK(bias.rows < ADDRESS_SPACE, "bias of shape ", shape_of(*given.bias), " is too large");
}

void Call::read_tables(std::optional<wpe_pass> pass) {
    const Tensor &p = *given.p;
    const int64_t rows = p.size(p.dim() - 2), first_delta = within_limit(given.first_delta);
    relative.beyond = beyond_code(given.beyond);
    wpe_range read = reached(rows, first_delta, relative.beyond);
    if (read.begin >= read.end) return;
    const bool with_zones = pass && has_zones();  // decode reads the rows
    if (with_zones) check_zones(rows);
    const bool low_rank = with_zones && zones_pay();
    if (low_rank) read = {0, rows};
    first_row = read.begin;
    relative.first_delta = first_delta + read.begin;
    relative.rows = read.end - read.begin;
    WPE_CHECK(relative.rows < ADDRESS_SPACE && head_bytes(relative.rows) < ADDRESS_SPACE,
              current_operator, ": p of shape ", shape_of(p), " is too large");
    if (!pass)
        tables.push_back(relative);
    else if (low_rank)
        pack_zones(*pass);
    else
        pack_tables(*pass);
}

void Call::pack_tables(wpe_pass pass) {
    const int64_t count = table_per_head() ? heads : 1;
    const int64_t size = bytes(kernels->zone_size(relative.rows, head_size, head_size, pass));
    const int64_t each = ceil_div(size, 64) * 64;
    packed = std::make_unique<Memory>(count, each);
    zones.assign(count, wpe_zone{});
    tables.assign(count, relative);
    run_tasks(count, 0, [&](int64_t h, char *) {
        zones[h].rows = relative.rows;
        zones[h].rank = head_size;
        kernels->pack_zone(&zones[h], packed->at(h * each), storage, head_size, table(h),
                           {nullptr, 0, 0}, pass);
        tables[h].zone_count = 1;
        tables[h].zones = &zones[h];
    });
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
                      (full ? c.size(1) == head_size
                            : u.dim() == 2 && u.size(0) == head_size && u.size(1) == c.size(1)) &&
                      c.size(1) <= head_size,
                  "a zone must be (rows, rank) and (", head_size,
                  ", rank), with at most that rank,"
                  " got ",
                  shape_of(c), " and ", shape_of(u));
        WPE_CHECK(c.size(0) <= rows - found, "zones have more rows than the ", rows, " of p");
        found += c.size(0);
    }
    WPE_CHECK(found == rows, "zones have ", found, " rows, p has ", rows);
}

// Return whether the zones take fewer products than the rows of p. A zone has a product with its
// basis first, so they pay when a query sees more than about a hundred keys on average. With the
// tables of wavelets that holds for head sizes of 32 to 128.
bool Call::zones_pay() const { return keys > (given.causal ? 224 : 112); }

// Pack the given zones. They come in rising delta, and the kernels need falling delta.
void Call::pack_zones(wpe_pass pass) {
    const std::vector<Tensor> &parts = *given.zones;
    int64_t size = 0;
    for (size_t z = 0; z < parts.size(); z += 2)
        size += bytes(kernels->zone_size(parts[z].size(0), parts[z].size(1), head_size, pass)) + 64;
    packed = std::make_unique<Memory>(1, size);
    int64_t used = 0;
    for (size_t z = parts.size(); z > 0; z -= 2) {
        const Tensor &c = parts[z - 2], &u = parts[z - 1];
        if (!c.size(0)) continue;
        wpe_zone zone{};
        zone.rows = c.size(0);
        zone.rank = c.size(1);
        wpe_matrix basis{nullptr, 0, 0};
        if (u.numel()) basis = {at(u, 0), u.stride(0), u.stride(1)};
        kernels->pack_zone(&zone, packed->at(used), storage, head_size,
                           {at(c, 0), c.stride(0), c.stride(1)}, basis, pass);
        used += (bytes(kernels->zone_size(zone.rows, zone.rank, head_size, pass)) + 63) / 64 * 64;
        zones.push_back(zone);
    }
    relative.zone_count = (int)zones.size();
    relative.zones = zones.data();
    tables.assign(1, relative);
}

}  // namespace wavepe
