// Where a thread works: its place in the block, the cluster and the sequence.
#ifndef QUANT_GRU_BLOCK_LAYOUT_CUH
#define QUANT_GRU_BLOCK_LAYOUT_CUH

#include "recurrence/thread_tile.cuh"

struct Position {
    int lane, warp;
    int lane8, quad;    // row and column of the lane in a fragment
    int half, local;    // of the warps of a group; group of the block
    int part;           // of the features, where warps split them
    int rank;           // of the block in its cluster
    int group;          // of 16 units, of all blocks
    int64_t H, N, T;    // units, rows and steps of the sequence
    int64_t first_row;  // of the tile
};

#endif
