// Which blocks and tiles there are: the jobs of a call, which follow from the problem alone.
#pragma once

#include "decode.h"

namespace {

// Enough for all threads; with fewer blocks, several jobs split the keys of a block.
constexpr int64_t ENOUGH_JOBS = 32;
constexpr int64_t TILES_PER_SPLIT = 4;
// Where splits of the keys must not depend on other entries, each has so many tiles. Splits of decode are short, which
// costs nothing at the speed of memory. With more rows than MOST_ROWS_OF_SPLIT_KEYS, keys are not split.
constexpr int64_t TILES_PER_LONG_SPLIT = 16, MOST_ROWS_OF_SPLIT_KEYS = 64;
constexpr int64_t TILE_BYTES = (HAS_TILES ? 256 : 128) << 10;  // of keys, at most
constexpr int64_t LEAST_ROWS = HAS_TILES ? 32 : 24;            // of a block, unless there are fewer
// Threads seldom run at the same speed, so the jobs that begin last are small: all threads end at about the same time.
constexpr int64_t CUT_BLOCKS = 16, NUM_CUTS = 2, LEAST_CUT_ROWS = 72;
constexpr int64_t PARTIALS_BYTES = 32 << 20;

// ---- entries and blocks ---------------------------------------------------------------------------------------------

NOINLINE bool make_entries(Work &work) {
    const Call &call = work.call;
    if (!work.allocate(work.entries, call.batch)) return false;
    work.num_entries = call.batch;
    for (int64_t b = 0; b < call.batch; ++b) {
        Entry &entry = work.entries[b];
        entry = Entry{b, b, 0, 0, call.seqlen_q, call.seqlen_k, call.diagonal};
        if (call.arrays[CU_SEQLENS_Q]) {
            auto start = [&](Array array, int64_t i) { return int64_t(*(const int32_t *)address(call, array, 4, i)); };
            entry.batch = 0;
            entry.first_q = start(CU_SEQLENS_Q, b);
            entry.first_k = start(CU_SEQLENS_K, b);
            entry.seqlen_q = start(CU_SEQLENS_Q, b + 1) - entry.first_q;
            entry.seqlen_k = start(CU_SEQLENS_K, b + 1) - entry.first_k;
            entry.diagonal = call.has_own_diagonals ? entry.seqlen_k - entry.seqlen_q : 0;
        }
        if (call.arrays[KV_LENGTHS]) {
            const char *p = address(call, KV_LENGTHS, call.lengths_are_64_bit ? 8 : 4, b);
            const int64_t length =
                call.lengths_are_64_bit ? int64_t(*(const int64_t *)p) : int64_t(*(const int32_t *)p);
            entry.seqlen_k = smaller(larger(length, 0), call.seqlen_k);
            if (call.has_own_diagonals) entry.diagonal = entry.seqlen_k - call.seqlen_q;
        }
    }
    return true;
}

// Rows of a block: as many as `most` allows, about equally many in each.
NOINLINE int64_t rows_in_blocks(const Call &call, int64_t seqlen_q, int64_t most) {
    if (call.arrays[BLOCK_MASK]) {
        const int64_t whole = call.block_rows * larger(1, most / call.block_rows);
        return ceil_div(whole, ceil_div(whole, most));
    }
    if (call.window_left < NO_BOUND && call.window_right < NO_BOUND)
        most = smaller(most, larger(2 * GROUP, round_up((call.window_left + call.window_right) / 2, GROUP)));
    const int64_t count = ceil_div(larger(seqlen_q, 1), most);
    return smaller(round_up(ceil_div(larger(seqlen_q, 1), count), GROUP), most);
}

// Keys of a tile, at most `most`: where possible, tiles lie within blocks of a block mask.
inline int64_t keys_in_tiles(const Call &call, int64_t most) {
    if (call.arrays[BLOCK_MASK])
        for (int64_t keys = most; keys >= 48; keys -= 16)
            if (call.block_keys % keys == 0) return keys;
    return most;
}

// Heads of a block, where `group` heads share keys: as many as fit.
inline int64_t heads_in_blocks(int64_t seqlen_q, int64_t rows, int64_t group, int64_t most) {
    return smaller(group, larger(1, most / larger(smaller(rows, seqlen_q), 1)));
}

// Chooses how many rows and keys are computed at a time, so that their buffers stay in the cache.
template <class T> NOINLINE void choose_tiles(Work &work, int64_t most_rows, int64_t most_keys) {
    const Sizes<T> sizes(work.call);
    const int64_t bytes = larger(sizes.dim, sizes.dim_v) * int64_t(sizeof(T));
    while (most_keys > FEWEST_KEYS && most_keys * bytes > TILE_BYTES) most_keys /= 2;
    work.keys_per_tile = keys_in_tiles(work.call, most_keys);
    work.rows_per_block = larger(LEAST_ROWS, bytes <= 1024 ? most_rows : bytes <= 2048 ? most_rows / 2 : most_rows / 4);
    // Small problems have small buffers.
    const Call &call = work.call;
    const int64_t group = group_of(call);
    work.keys_per_tile = smaller(work.keys_per_tile, round_up(larger(call.seqlen_k, 1), 16));
    if (!call.arrays[BLOCK_MASK])
        work.rows_per_block = smaller(work.rows_per_block, round_up(larger(call.seqlen_q * group, 1), GROUP));
}

// How many heads a block of an entry has; they share their keys.
inline int64_t heads_of_block(const Work &work, const Entry &entry) {
    const Call &call = work.call;
    const int64_t group = group_of(call), most = work.rows_per_block;
    return heads_in_blocks(entry.seqlen_q, rows_in_blocks(call, entry.seqlen_q, most), group, most);
}

// How many blocks all entries have, and how many one head has at most.
struct BlockCount {
    int64_t all = 0, in_head = 0;
    NOINLINE explicit BlockCount(const Work &work) {
        const Call &call = work.call;
        const int64_t group = group_of(call);
        for (int64_t e = 0; e < work.num_entries; ++e) {
            const Entry &entry = work.entries[e];
            if (!entry.seqlen_q || !group) continue;
            const int64_t own = ceil_div(entry.seqlen_q, rows_in_blocks(call, entry.seqlen_q, work.rows_per_block));
            in_head = larger(in_head, own);
            all += own * ceil_div(group, heads_of_block(work, entry)) * call.num_heads_kv;
        }
    }
};

// Cuts each of the last blocks in two if it has enough rows.
inline void cut_last_blocks(Work &work) {
    const int64_t count = work.num_blocks;
    for (int64_t i = larger(0, count - CUT_BLOCKS); i < count; ++i) {
        Block &block = work.blocks[i];
        if (block.num_rows < LEAST_CUT_ROWS || block.num_splits > 1) continue;
        Block &rest = work.blocks[work.num_blocks++] = block;
        block.num_rows = round_up(block.num_rows / 2, GROUP);
        rest.first_row += block.num_rows;
        rest.num_rows -= block.num_rows;
    }
}

// How the keys of the blocks of an entry are split: so many splits, of so many tiles each.
struct Splits {
    int64_t count = 1, tiles = 0;
};

// Splits of equal length that make enough jobs, if there are fewer blocks.
inline Splits splits_of_call(const Work &work, int64_t num_blocks, int64_t bytes_of_row) {
    const Call &call = work.call;
    if (!num_blocks || num_blocks >= ENOUGH_JOBS || call.arrays[CU_SEQLENS_Q]) return {};
    const int64_t tiles = ceil_div(call.seqlen_k, work.keys_per_tile);
    int64_t count = smaller(ceil_div(ENOUGH_JOBS, num_blocks), tiles / TILES_PER_SPLIT);
    count = larger(1, smaller(count, PARTIALS_BYTES / (num_blocks * work.rows_per_block * bytes_of_row)));
    const int64_t tiles_of_split = ceil_div(tiles, count);
    return {ceil_div(larger(tiles, 1), larger(tiles_of_split, 1)), tiles_of_split};
}

// Splits that follow from the entry alone.
inline Splits splits_of_entry(const Work &work, const Entry &entry) {
    const int64_t rows = entry.seqlen_q * group_of(work.call);
    if (rows > MOST_ROWS_OF_SPLIT_KEYS) return {};
    const int64_t tiles = rows <= DECODE_ROWS ? TILES_PER_SPLIT : TILES_PER_LONG_SPLIT;
    return {larger(1, ceil_div(entry.seqlen_k, tiles * work.keys_per_tile)), tiles};
}

// Makes the blocks with the i-th rows of a head of k of an entry.
NOINLINE void make_blocks_of(Work &work, const Splits &splits, int64_t i, int64_t e, int64_t h) {
    const Call &call = work.call;
    const Entry &entry = work.entries[e];
    const int64_t group = group_of(call), heads = heads_of_block(work, entry);
    const int64_t rows = rows_in_blocks(call, entry.seqlen_q, work.rows_per_block);
    if (i * rows >= entry.seqlen_q) return;
    const int64_t keys = splits.tiles * work.keys_per_tile;
    for (int64_t g = 0; g < group; g += heads) {
        if (splits.count > 1) work.split_blocks[work.num_split_blocks++] = work.num_blocks;
        for (int64_t n = 0; n < splits.count; ++n) {
            Block &block = work.blocks[work.num_blocks++];
            block.entry = e;
            block.head_kv = h;
            block.first_head = h * group + g;
            block.num_heads = smaller(heads, group - g);
            block.first_row = i * rows;
            block.num_rows = smaller(rows, entry.seqlen_q - i * rows);
            block.first_key = n * keys;
            block.stop_key = n + 1 < splits.count ? (n + 1) * keys : entry.seqlen_k;
            block.split = n;
            block.num_splits = splits.count;
            if (splits.count > 1) work.rows_per_partial = larger(work.rows_per_partial, rows_of(block));
        }
    }
}

// Makes the blocks of all entries. Those of the last rows, which may attend to the most keys, come first.
NOINLINE bool make_blocks(Work &work, bool splits_keys, int64_t bytes_of_row) {
    const Call &call = work.call;
    const BlockCount blocks(work);
    const int64_t count = blocks.all, num_heads = work.num_entries * call.num_heads_kv;
    const Splits of_call = splits_keys && !call.batch_invariant ? splits_of_call(work, count, bytes_of_row) : Splits();
    auto splits_of = [&](const Entry &entry) {
        return splits_keys && call.batch_invariant ? splits_of_entry(work, entry) : of_call;
    };
    int64_t most_splits = 1;
    for (int64_t e = 0; e < work.num_entries; ++e) most_splits = larger(most_splits, splits_of(work.entries[e]).count);
    if (!work.allocate(work.blocks, count * most_splits + NUM_CUTS * CUT_BLOCKS)) return false;
    if (most_splits > 1 && !work.allocate(work.split_blocks, count)) return false;
    if (work.packed.are_held && !work.allocate(work.packed.heads, num_heads)) return false;
    auto make = [&](int64_t i, int64_t head) {
        const int64_t e = head / call.num_heads_kv;
        make_blocks_of(work, splits_of(work.entries[e]), i, e, head % call.num_heads_kv);
    };
    // Where packed tiles stay in the cache, the blocks of a head follow each other.
    if (work.packed.are_held) {
        for (int64_t head = 0; head < num_heads; ++head) {
            const int64_t first = work.num_blocks;
            for (int64_t i = blocks.in_head - 1; i >= 0; --i) make(i, head);
            new (&work.packed.heads[head]) HeadBlocks{{first}, work.num_blocks};
        }
    } else {
        for (int64_t i = blocks.in_head - 1; i >= 0; --i)
            for (int64_t head = 0; head < num_heads; ++head) make(i, head);
    }
    const bool may_cut = (!HAS_TILES || !call.batch_invariant) && !work.packed.are_held;
    if (may_cut && !call.arrays[BLOCK_MASK])
        for (int n = 0; n < NUM_CUTS; ++n) cut_last_blocks(work);
    return true;
}

// The block that a thread takes next, and its head: of the head of its last block, else of one that no thread has
// begun, else of the one with the most blocks left. There is one for each job, whichever jobs have begun.
inline int64_t take_block(Work &work, int64_t &head) {
    const int64_t num_heads = work.num_entries * work.call.num_heads_kv, none = -1;
    auto take = [&](int64_t from) {
        head = from;
        const int64_t block = work.packed.heads[from].next.fetch_add(1, std::memory_order_relaxed);
        return block < work.packed.heads[from].stop ? block : none;
    };
    int64_t block = head == NO_HEAD ? none : take(head);
    while (block == none) {
        int64_t from = work.packed.next_head.fetch_add(1, std::memory_order_relaxed);
        if (from >= num_heads) {
            auto num_left = [&](int64_t h) { return work.packed.heads[h].stop - work.packed.heads[h].next.load(); };
            from = 0;
            for (int64_t h = 1; h < num_heads; ++h)
                if (num_left(h) > num_left(from)) from = h;
        }
        block = take(from);
    }
    return block;
}

// ---- tiles of keys --------------------------------------------------------------------------------------------------

// The blocks of the heads that share keys, in the order in which jobs go through them. The last rows of a head come
// first: where a window is causal, the keys of later tiles are visible to rows that those of earlier tiles are not, so
// that jobs which begin together do not wait for each other.
struct Steps {
    int64_t rows, heads, in_head, count, group;
    NOINLINE Steps(const Work &work, const Entry &entry) {
        const Call &call = work.call;
        group = group_of(call);
        rows = rows_in_blocks(call, entry.seqlen_q, work.rows_per_block);
        heads = heads_in_blocks(entry.seqlen_q, rows, group, work.rows_per_block);
        in_head = ceil_div(entry.seqlen_q, rows);
        count = group ? in_head * ceil_div(group, heads) : 0;
    }
    NOINLINE Block block(const Entry &entry, const KeyTile &tile, int64_t step) const {
        Block block = {};
        const int64_t head = step / in_head * heads, row = (in_head - 1 - step % in_head) * rows;
        block.entry = tile.entry;
        block.head_kv = tile.head_kv;
        block.first_head = tile.head_kv * group + head;
        block.num_heads = smaller(heads, group - head);
        block.first_row = row;
        block.num_rows = smaller(rows, entry.seqlen_q - row);
        return block;
    }
};

// How many tiles all entries have, and how many one head has at most.
struct TileCount {
    int64_t all = 0, in_head = 0;
    NOINLINE explicit TileCount(const Work &work) {
        for (int64_t e = 0; e < work.num_entries; ++e) {
            const int64_t own = ceil_div(work.entries[e].seqlen_k, work.keys_per_tile);
            all += own * work.call.num_heads_kv;
            in_head = larger(in_head, own);
        }
    }
};

// Makes the tiles of all heads: the first tile of each head, then the second of each, so that a job seldom waits for
// another.
NOINLINE bool make_tiles(Work &work) {
    const Call &call = work.call;
    const int64_t keys = work.keys_per_tile, num_heads = call.num_heads_kv;
    const int64_t *bias_strides = work.results().strides[DBIAS];
    const TileCount tiles(work);
    int64_t *last = nullptr;
    if (!work.allocate(work.tiles, tiles.all) || !work.allocate(last, 2 * work.num_entries * num_heads)) return false;
    int64_t *last_of_bias = last + work.num_entries * num_heads;
    for (int64_t x = 0; x < work.num_entries * num_heads; ++x) last[x] = -1;
    for (int64_t j = 0; j < tiles.in_head; ++j) {
        for (int64_t x = 0; x < work.num_entries * num_heads; ++x) last_of_bias[x] = -1;
        for (int64_t e = 0; e < work.num_entries; ++e) {
            const int64_t seqlen_k = work.entries[e].seqlen_k;
            if (j * keys >= seqlen_k) continue;
            for (int64_t h = 0; h < num_heads; ++h) {
                int64_t &before = last[e * num_heads + h];
                int64_t &bias_before = last_of_bias[(bias_strides[0] ? e * num_heads : 0) + (bias_strides[1] ? h : 0)];
                work.tiles[work.num_tiles] =
                    KeyTile{e, h, j * keys, smaller(keys, seqlen_k - j * keys), before, bias_before};
                before = bias_before = work.num_tiles++;
            }
        }
    }
    return true;
}

// Every tile loads all queries, and adds its partial dq to memory. So tiles are long, if they make so many jobs that
// threads of different speeds end at about the same time, or if their length must not depend on other entries.
template <class T, class Buffers> NOINLINE void choose_backward_tiles(Work &work) {
    for (int64_t keys = Buffers::MOST_KEYS; keys >= USUAL_KEYS; keys /= 2) {
        choose_tiles<T>(work, Buffers::MOST_ROWS, keys);
        if (work.call.batch_invariant || TileCount(work).all >= 2 * ENOUGH_JOBS) break;
    }
}

}  // namespace
