// Tiles of scores: which there are, how their operands are loaded, and what options do to them.
#pragma once

#include "cap.h"
#include "dropout.h"
#include "rows.h"
#include "work.h"

namespace {

// Keys of a tile: of the backward pass at most, of the forward pass, and of the widest heads.
constexpr int64_t MAX_KEYS = 256, USUAL_KEYS = 128, FEWEST_KEYS = 32;
// Rows whose scores are computed at a time, and rows of them whose softmax is computed at a time, in the first cache.
constexpr int64_t GROUP = HAS_TILES ? 64 : NUM_REGISTERS == 32 && !HAS_LANE_PRODUCTS ? 12 : 24, SUBGROUP = 16;
// Rows of a group in the forward pass without a window: more of them, so that k and v come from the second cache less
// often. (A window hides other keys from each row.)
constexpr int64_t WIDE_GROUP = VECTOR_BYTES == 64 && !HAS_TILES ? 48 : GROUP;

// The stride of rows of scores: 64 bytes more than a power of two, so that the rows of a column of blocks do not
// fall into the same sets of the cache.
template <class T> constexpr int64_t SCORES_STRIDE = MAX_KEYS + 64 / sizeof(T);

// The same of tiles that are transposed, so that their columns are keys.
template <class T> inline int64_t keys_stride_of(const Work &work) {
    return work.keys_per_tile + 64 / int64_t(sizeof(T));
}

// Sizes of the buffers of a tile.
template <class T> struct Sizes {
    int64_t dim, dim_v;  // multiples of the lanes of a vector
    explicit Sizes(const Call &call)
        : dim(round_up(call.head_dim, LANES<T>)), dim_v(round_up(call.head_dim_v, LANES<T>)) {}
};

// Hands out the memory of one thread, piece by piece; without memory it only counts the bytes.
struct Scratch {
    char *memory;
    int64_t used = 0;
    template <class T> T *take(int64_t count) {
        T *p = memory ? (T *)(memory + used) : nullptr;
        used += round_up(count * sizeof(T), 64);
        return p;
    }
};

struct Row {
    int64_t head, i;  // of q, in its entry
};

inline Row row_of(const Block &block, int64_t r) {
    return block.num_heads == 1 ? Row{block.first_head, block.first_row + r}
                                : Row{block.first_head + r / block.num_rows, block.first_row + r % block.num_rows};
}

inline int64_t rows_of(const Block &block) { return block.num_heads * block.num_rows; }

inline char *address(const Call &call, Array array, int64_t size, int64_t b, int64_t h = 0, int64_t i = 0,
                     int64_t j = 0) {
    const int64_t *strides = call.strides[array];
    return call.arrays[array] + (b * strides[0] + h * strides[1] + i * strides[2] + j * strides[3]) * size;
}

// A row of q, out, dout or dq.
inline char *row_address(const Call &call, Array array, const Entry &entry, Row row) {
    return address(call, array, size_of(call.dtype), entry.batch, row.head, entry.first_q + row.i);
}

// A row of k, v, dk or dv, or the number that a key or a value is multiplied by.
inline char *key_address(const Call &call, Array array, const Entry &entry, int64_t head_kv, int64_t j) {
    const bool is_scale = array == K_SCALE || array == V_SCALE;
    const int64_t size = is_scale ? sizeof(float) : size_of(call.kv_dtype);
    if (call.page_size && (array == K || array == V || is_scale)) {
        const int64_t page = *(const int32_t *)address(call, BLOCK_TABLE, 4, entry.index, j / call.page_size);
        return address(call, array, size, page, head_kv, j % call.page_size);
    }
    return address(call, array, size, entry.batch, head_kv, entry.first_k + j);
}

// A number of an array that has one for each row or head.
template <class T> inline T &number(const Call &call, Array array, int64_t b, int64_t h, int64_t i = 0) {
    return *(T *)address(call, array, sizeof(T), b, h, i);
}

// Loads rows of a block, with zeros after each row and below the last.
template <class T>
NOINLINE void load_rows(const Call &call, Array array, const Entry &entry, const Block &block, int64_t dim, T *out,
                        int64_t stride, int64_t padded_rows) {
    const int64_t num_rows = rows_of(block), step = call.strides[array][3];
    for (int64_t r = 0; r < num_rows; ++r) {
        load_row(row_address(call, array, entry, row_of(block, r)), call.dtype, step, dim, out + r * stride);
        clear(out + r * stride + dim, stride - dim);
    }
    clear(out + num_rows * stride, (padded_rows - num_rows) * stride);
}

// Whether the sign of rows changes as they are loaded: q has that of the scale.
inline bool has_negative_rows(const Call &call, Array array) { return array == Q && call.scale < 0; }

// Loads rows of q or dout.
template <class T>
NOINLINE void load_signed_rows(const Call &call, Array array, const Entry &entry, const Block &block, int64_t dim,
                               T *out) {
    const int64_t num_rows = rows_of(block), stride = round_up(dim, LANES<T>);
    load_rows(call, array, entry, block, dim, out, stride, num_rows);
    if (has_negative_rows(call, array))
        for (int64_t x = 0; x < num_rows * stride; ++x) out[x] = -out[x];
}

// Whether rows of q or dout of a block can be read where they lie, as rows of `dtype`: one head has them, and they are
// `unit` or a multiple of it long and adjacent. A copy takes a hundredth of a short call.
inline bool are_adjacent_rows(const Call &call, Array array, const Block &block, int64_t dtype, int64_t dim,
                              int64_t unit) {
    const int64_t *strides = call.strides[array];
    return block.num_heads == 1 && call.dtype == dtype && strides[3] == 1 && strides[2] == dim && dim % unit == 0 &&
           !has_negative_rows(call, array);
}

// Rows of q or dout: where they lie, or loaded to `space`.
template <class T>
inline T *find_rows(const Call &call, Array array, const Entry &entry, const Block &block, int64_t dim, T *space) {
    if (are_adjacent_rows(call, array, block, OWN_DTYPE<T>, dim, LANES<T>))
        return (T *)row_address(call, array, entry, row_of(block, 0));
    load_signed_rows(call, array, entry, block, dim, space);
    return space;
}

// Whether rows of k or v can be read where they lie: they are whole vectors of the dtype of the computation.
template <class T> inline bool has_whole_rows(const Call &call, Array array, int64_t dim) {
    return size_of(call.kv_dtype) == int64_t(sizeof(T)) && !call.page_size && call.strides[array][3] == 1 &&
           dim % LANES<T> == 0;
}

// Rows of k or v: of `count` keys from `first` on.
struct KeySlice {
    const Call &call;
    Array array;
    const Entry &entry;
    int64_t head_kv, first, count;

    int64_t dim() const { return array == K ? call.head_dim : call.head_dim_v; }
    int64_t step() const { return call.strides[array][3]; }
    const char *row(int64_t j) const { return key_address(call, array, entry, head_kv, first + j); }
};

// Loads rows of k or v, with zeros after each row and below the last.
template <class T> NOINLINE void load_keys(const KeySlice &keys, T *out, int64_t stride, int64_t padded_rows) {
    const Call &call = keys.call;
    const int64_t dim = keys.dim();
    const Array scales = keys.array == K ? K_SCALE : V_SCALE;
    for (int64_t j = 0; j < keys.count; ++j) {
        load_row(keys.row(j), call.kv_dtype, keys.step(), dim, out + j * stride);
        if (call.arrays[scales]) {
            const T scale = T(*(const float *)key_address(call, scales, keys.entry, keys.head_kv, keys.first + j));
            for (int64_t x = 0; x < dim; ++x) out[j * stride + x] *= scale;
        }
        clear(out + j * stride + dim, stride - dim);
    }
    clear(out + keys.count * stride, (padded_rows - keys.count) * stride);
}

// ---- what is visible ------------------------------------------------------------------------------------------------

// From `first` to before `stop`.
struct Range {
    int64_t first, stop;
};
using Keys = Range;

// The first and the last of some neighbouring rows of a block.
struct Span {
    int64_t first, last;
};

inline Span span_of(const Block &block, int64_t r, int64_t count) {
    const Row from = row_of(block, r), to = row_of(block, r + count - 1);
    return from.head == to.head ? Span{from.i, to.i} : Span{block.first_row, block.first_row + block.num_rows - 1};
}

// The keys that the window and the length let rows from `first` to `last` attend to, all together.
inline Keys keys_visible_to(const Call &call, const Entry &entry, int64_t first, int64_t last) {
    const int64_t begin = first + entry.diagonal - call.window_left,
                  end = last + entry.diagonal + call.window_right + 1;
    const int64_t stop = smaller(larger(end, 0), entry.seqlen_k);
    return Keys{smaller(larger(begin, 0), stop), stop};
}

// The same for all rows of a block.
inline Keys keys_visible_to(const Call &call, const Entry &entry, const Block &block) {
    return keys_visible_to(call, entry, block.first_row, block.first_row + block.num_rows - 1);
}

// The keys that every one of these rows attends to.
inline Keys keys_visible_to_all(const Call &call, const Entry &entry, int64_t first, int64_t last) {
    const int64_t begin = last + entry.diagonal - call.window_left,
                  end = first + entry.diagonal + call.window_right + 1;
    return Keys{larger(begin, 0), smaller(end, entry.seqlen_k)};
}

// Whether mask and block mask leave anything of keys [first, first + count) to the rows of a block.
NOINLINE bool any_visible(const Call &call, const Entry &entry, const Block &block, int64_t first, int64_t count) {
    if (call.arrays[BLOCK_MASK]) {
        bool any = false;
        for (int64_t h = 0; h < block.num_heads && !any; ++h)
            for (int64_t i = block.first_row / call.block_rows;
                 i <= (block.first_row + block.num_rows - 1) / call.block_rows && !any; ++i)
                for (int64_t j = first / call.block_keys; j <= (first + count - 1) / call.block_keys && !any; ++j)
                    any = *address(call, BLOCK_MASK, 1, entry.index, block.first_head + h, i, j);
        if (!any) return false;
    }
    if (call.arrays[MASK]) {
        const int64_t step = call.strides[MASK][3];
        const int64_t rows = call.strides[MASK][2] ? block.num_rows : 1;
        const int64_t heads = call.strides[MASK][1] ? block.num_heads : 1;
        for (int64_t h = 0; h < heads; ++h)
            for (int64_t i = 0; i < rows; ++i) {
                const char *p = address(call, MASK, 1, entry.index, block.first_head + h, block.first_row + i, first);
                if (step == 1) {
                    // True may be any byte but 0, as in a view of other bytes.
                    char any = 0;
                    for (int64_t j = 0; j < count; ++j) any |= p[j];
                    if (any) return true;
                } else {
                    for (int64_t j = 0; j < (step ? count : 1); ++j)
                        if (p[j * step]) return true;
                }
            }
        return false;
    }
    return true;
}

// Whether the window, the length and these masks leave any of the keys [first, first + count) to the rows of a block.
inline bool attends_to(const Call &call, const Entry &entry, const Block &block, int64_t first, int64_t count) {
    const Keys keys = keys_visible_to(call, entry, block);
    return keys.stop > first && keys.first < first + count && any_visible(call, entry, block, first, count);
}

// How many rows of a block, from r0 on, are computed at a time: at most `most`, and none past a block of a block mask.
inline int64_t rows_of_group(const Call &call, const Block &block, int64_t r0, int64_t most) {
    const int64_t n = smaller(most, rows_of(block) - r0);
    if (!call.arrays[BLOCK_MASK]) return n;
    return smaller(n, call.block_rows - row_of(block, r0).i % call.block_rows);
}

// Whether the block mask leaves a key to any of some neighbouring rows of a block.
inline bool is_in_visible_block(const Call &call, const Entry &entry, const Block &block, int64_t r0, int64_t num_rows,
                                int64_t key) {
    for (int64_t r = r0; r < r0 + num_rows;) {
        const Row row = row_of(block, r);
        if (*address(call, BLOCK_MASK, 1, entry.index, row.head, row.i / call.block_rows, key / call.block_keys))
            return true;
        // Goes on to other blocks of the mask: to the row after the last one of these, or to the first of the next
        // head.
        const int64_t last = smaller(block.first_row + block.num_rows, (row.i / call.block_rows + 1) * call.block_rows);
        r += last - row.i;
    }
    return false;
}

// The keys of [first, first + count) from the first to the last that window, length and block mask let any of some
// neighbouring rows attend to. They are counted from `first`, and begin with a whole vector; the range is empty if
// there are none. Blocks of a mask are whole vectors, and tiles begin with a vector of them.
template <class T>
NOINLINE Keys keys_of_group(const Call &call, const Entry &entry, const Block &block, int64_t r0, int64_t num_rows,
                            int64_t first, int64_t count) {
    const Span span = span_of(block, r0, num_rows);
    const Keys visible = keys_visible_to(call, entry, span.first, span.last);
    int64_t begin = larger(visible.first - first, 0), end = smaller(visible.stop - first, count);
    if (call.arrays[BLOCK_MASK]) {
        const int64_t size = call.block_keys;
        auto is_visible = [&](int64_t key) {
            return is_in_visible_block(call, entry, block, r0, num_rows, first + key);
        };
        while (begin < end && !is_visible(begin)) begin = (first + begin) / size * size + size - first;
        while (begin < end && !is_visible(end - 1)) end = (first + end - 1) / size * size - first;
    }
    return begin < end ? Keys{begin / LANES<T> * LANES<T>, end} : Keys{0, 0};
}

// Where the tile of a key begins, in a pass over all keys of some rows. Tiles may begin with the first keys that these
// rows attend to, which depend on how rows are cut into blocks, or they lie where those of all other rows do.
inline int64_t tile_begin(const Work &work, int64_t key) {
    const Call &call = work.call;
    const int64_t whole =
        call.arrays[BLOCK_MASK] || work.packed.are_held || call.batch_invariant ? work.keys_per_tile : 16;
    return key / whole * whole;
}

// ---- scores ---------------------------------------------------------------------------------------------------------

// The weight of a score s is 2^(factor * (s - row_max)). Scores are products of q and k, which `factor` scales. Where
// options change scores, or the factor would be 0, products are scaled before. The difference is computed before it is
// scaled, because then it is exact where it matters, however large scores are.
template <class T> struct Scaling {
    bool acts_on_scores;
    T factor;
    T rise;          // the row max is raised if a score is above it by more than this: by a factor of e^8 of its weight
    T least;         // a score that is below the row max by more than this has no weight
    double natural;  // a score times this is the exponent of e in its weight
    explicit Scaling(const Call &call) {
        acts_on_scores = call.arrays[BIAS] || call.arrays[ALIBI_SLOPES] || has_cap(call) || call.scale == 0;
        natural = acts_on_scores ? 1.0 : size_of_scale(call);
        factor = T(natural * 1.4426950408889634);
        const double most = 1e30;
        rise = T(8 / natural < most ? 8 / natural : most);
        least = -T(-double(Vectors<T>::LOWEST) / factor < most ? -double(Vectors<T>::LOWEST) / factor : most);
    }
};

// Scores of rows of a block from r0 on, of stride SCORES_STRIDE, and of keys [first, first + count).
struct ScoreTile {
    const Call &call;
    const Entry &entry;
    const Block &block;
    int64_t r0, num_rows, first, count;
    int64_t padded;     // count, rounded up to whole vectors
    int64_t next_bias;  // elements from their bias to the one that is needed next

    Row row(int64_t r) const { return row_of(block, r0 + r); }
    // The tile of so many of its rows, from r on.
    ScoreTile rows(int64_t r, int64_t rows) const {
        return {call, entry, block, r0 + r, rows, first, count, padded, next_bias};
    }
};

// The bias of some rows of a block: where each begins, and what its numbers are.
struct BiasRows {
    int64_t dtype;
    const char *at[SUBGROUP];
};

// Finds the bias of a tile of at most SUBGROUP rows, which is `call`'s. It is read where it lies if it has whole
// vectors of neighbours, and from `copies` otherwise.
template <class T> inline void find_bias(const Call &call, const ScoreTile &tile, T *copies, BiasRows &rows) {
    const int64_t *strides = call.strides[BIAS];
    const int64_t size = size_of(call.bias_dtype), count = tile.count;
    const bool are_neighbours = strides[3] == 1, is_copied = !are_neighbours || count != tile.padded;
    const bool is_shared = strides[2] == 0 && (strides[1] == 0 || tile.block.num_heads == 1);
    rows.dtype = is_copied ? int64_t(sizeof(T) == 4 ? FLOAT32 : FLOAT64) : call.bias_dtype;
    for (int64_t r = 0; r < tile.num_rows; ++r) {
        const Row row = tile.row(r);
        const char *p = address(call, BIAS, size, tile.entry.index, row.head, row.i, tile.first);
        // Rows have large strides in memory, and no processor prefetches them by itself. All of these are prefetched at
        // once.
        for (int64_t x = 0; x < count * size && are_neighbours && !is_shared; x += 64) {
            __builtin_prefetch(p + x, 0, 3);
            __builtin_prefetch(p + tile.next_bias * size + x, 0, 2);
        }
        T *copy = copies + (is_shared ? 0 : r) * MAX_KEYS;
        if (is_copied && (r == 0 || !is_shared)) load_row(p, call.bias_dtype, strides[3], count, copy);
        rows.at[r] = is_copied ? (const char *)copy : p;
    }
}

// Calls run(r, row, s) for each row, with its scores s.
template <class T, class F> inline void for_rows(const ScoreTile &tile, T *scores, F run) {
    for (int64_t r = 0; r < tile.num_rows; ++r) run(r, tile.row(r), scores + r * SCORES_STRIDE<T>);
}

// What options add to products of q and k, after the cap: their scale, a bias and slopes.
template <class T>
inline void add_bias_and_slopes(const Scaling<T> &scaling, const ScoreTile &tile, T *scores, T *copies) {
    const Call &call = tile.call;
    BiasRows bias;
    const bool has_bias = call.arrays[BIAS];
    if (has_bias) find_bias(call, tile, copies, bias);
    const Vector<T> scale = splat(T(has_cap(call) ? 1 : size_of_scale(call)));
    auto add = [&](auto has_slopes, auto add_bias) {
        for_rows(tile, scores, [&](int64_t r, Row row, T *s) {
            const Vector<T> slope =
                splat(has_slopes ? -number<T>(call, ALIBI_SLOPES, tile.entry.index, row.head) : T(0));
            const Vector<T> start = splat(T(tile.first - row.i - tile.entry.diagonal)) + iota<T>();
            for (int64_t j = 0; j < tile.padded; j += LANES<T>) {
                const Vector<T> x = add_bias(load(s + j), r, j);
                store(s + j, has_slopes ? add_product(x, slope, size_of_each<T>(start + splat(T(j)))) : x);
            }
        });
    };
    auto add_to_scaled = [&](auto has_slopes) {
        if (!has_bias) return add(has_slopes, [&](Vector<T> x, int64_t, int64_t) { return x * scale; });
        with_element_type<T>(bias.dtype, [&](auto *numbers) {
            add(has_slopes, [&](Vector<T> x, int64_t r, int64_t j) {
                return add_product(load_as<T>(decltype(numbers)(bias.at[r]) + j), x, scale);
            });
        });
    };
    if (call.arrays[ALIBI_SLOPES]) {
        add_to_scaled(std::true_type());
    } else if (has_bias || (scaling.acts_on_scores && !has_cap(call))) {
        add_to_scaled(std::false_type());
    }
}

// Hides the scores of pairs outside of the window, and past the length.
template <class T> inline void hide_outside_window(const ScoreTile &tile, T *scores) {
    const int64_t first = tile.first, padded = tile.padded;
    const Vector<T> hidden = splat(T(-__builtin_inf()));
    const Span span = span_of(tile.block, tile.r0, tile.num_rows);
    const Keys all = keys_visible_to_all(tile.call, tile.entry, span.first, span.last);
    if (all.first <= first && all.stop >= first + padded) return;
    for_rows(tile, scores, [&](int64_t, Row row, T *s) {
        const Keys visible = keys_visible_to(tile.call, tile.entry, row.i, row.i);
        const int64_t begin = larger(visible.first - first, 0), end = larger(smaller(visible.stop - first, padded), 0);
        // Vectors that are visible as a whole stay as they are.
        auto hide = [&](int64_t from, int64_t to) {
            for (int64_t j = from / LANES<T> * LANES<T>; j < to; j += LANES<T>) {
                const Vector<T> at = iota<T>() + splat(T(j));
                const Vector<T> x = at < splat(T(begin)) ? hidden : load(s + j);
                store(s + j, at >= splat(T(end)) ? hidden : x);
            }
        };
        hide(0, smaller(begin, padded));
        hide(end, padded);
    });
}

template <class T> inline void hide_by_mask(const ScoreTile &tile, T *scores) {
    const int64_t step = tile.call.strides[MASK][3];
    const T hidden = T(-__builtin_inf());
    for_rows(tile, scores, [&](int64_t, Row row, T *s) {
        const char *p = address(tile.call, MASK, 1, tile.entry.index, row.head, row.i, tile.first);
        if (step == 1) {
            for (int64_t j = 0; j < tile.count; ++j) s[j] = p[j] ? s[j] : hidden;
        } else {
            for (int64_t j = 0; j < tile.count; ++j) s[j] = p[j * step] ? s[j] : hidden;
        }
    });
}

template <class T> inline void hide_by_block_mask(const ScoreTile &tile, T *scores) {
    const Call &call = tile.call;
    for_rows(tile, scores, [&](int64_t, Row row, T *s) {
        for (int64_t j = 0; j < tile.count;) {
            const int64_t key_block = (tile.first + j) / call.block_keys;
            const int64_t stop = smaller(tile.count, (key_block + 1) * call.block_keys - tile.first);
            if (*address(call, BLOCK_MASK, 1, tile.entry.index, row.head, row.i / call.block_rows, key_block)) {
                j = stop;
            } else {
                for (; j < stop; ++j) s[j] = T(-__builtin_inf());
            }
        }
    });
}

// Turns products of q and k into scores, -inf where hidden. Where the scale is negative, q came with its sign changed.
// `copies` is for `find_bias`; `tanhs`, if given, gets the tanh(x) that the cap multiplies.
template <class T>
__attribute__((noinline)) void finish_scores(const Scaling<T> &scaling, const ScoreTile &tile, T *scores, T *copies,
                                             T *tanhs) {
    const Call &call = tile.call;
    if (has_cap(call))
        for_rows(tile, scores, [&](int64_t r, Row, T *s) {
            apply_cap(call, tile.padded, s, tanhs ? tanhs + r * SCORES_STRIDE<T> : tanhs);
        });
    add_bias_and_slopes(scaling, tile, scores, copies);
    hide_outside_window(tile, scores);
    if (call.arrays[MASK]) hide_by_mask(tile, scores);
    if (call.arrays[BLOCK_MASK]) hide_by_block_mask(tile, scores);
}

// The same, if there is anything to do.
template <class T>
inline void finish_scores_if_needed(const Scaling<T> &scaling, const ScoreTile &tile, T *scores, T *copies, T *tanhs) {
    const Span span = span_of(tile.block, tile.r0, tile.num_rows);
    const Keys visible = keys_visible_to_all(tile.call, tile.entry, span.first, span.last);
    if (scaling.acts_on_scores || tile.call.arrays[MASK] || tile.call.arrays[BLOCK_MASK] ||
        visible.first > tile.first || visible.stop < tile.first + tile.padded)
        finish_scores(scaling, tile, scores, copies, tanhs);
}

// Computes which weights of a block dropout keeps.
NOINLINE void load_kept(const Call &call, const Entry &entry, const Block &block, int64_t first, int64_t count,
                        unsigned char *kept) {
    for (int64_t h = 0; h < block.num_heads; ++h)
        kept_weights(call.seed, call.offset,
                     uint64_t(call.dropout_head + entry.index * call.dropout_heads + block.first_head + h),
                     call.dropout_steps, call.dropout_row + block.first_row, block.num_rows,
                     call.dropout_column + first, count, kept + h * block.num_rows * MAX_KEYS, MAX_KEYS);
}

}  // namespace
