// The end of a WHILE node's body (graphs/cuda_loop.py): counts a step, adds it and its live rows to a tally of all
// launches, and decides whether to go on. The declarations replace a header of the CUDA toolkit; NVRTC provides the
// function.
typedef unsigned long long cudaGraphConditionalHandle;
extern "C" __device__ void cudaGraphSetConditional(cudaGraphConditionalHandle handle, unsigned int value);

extern "C" __global__ void graphdecode_loop_goes_on(
    cudaGraphConditionalHandle handle, int *count, const int *limit, const int *running, const int *live_rows,
    long long *tally)
{
    int steps = *count + 1;
    *count = steps;
    tally[0] += 1;
    tally[1] += *live_rows;
    cudaGraphSetConditional(handle, steps < *limit && *running > 0);
}
