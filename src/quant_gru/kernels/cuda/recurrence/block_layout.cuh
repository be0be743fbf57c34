// The position of a thread in the block, the cluster and the sequence.
#ifndef QUANT_GRU_BLOCK_LAYOUT_CUH
#define QUANT_GRU_BLOCK_LAYOUT_CUH

#include "recurrence/thread_tile.cuh"

struct Position {
    int lane, warp;
    int lane8, quad;    // row and column of the lane in a fragment
    int half, local;    // index of the warp in its group, index of the group in the block
    int part;           // index of the warp's part of the features, if warps split them
    int rank;           // index of the block in its cluster
    int group;          // index of the group of 16 units in the cluster
    int64_t H, N, T;    // units, rows and steps of the sequence
    int64_t first_row;  // first row of the tile
};

#endif
