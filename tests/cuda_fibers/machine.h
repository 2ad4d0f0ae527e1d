// The machine that runs kernels of CUDA C++ on one thread of a CPU: threads of blocks and clusters as fibers, in an
// order drawn from a seed, with barriers, bulk copies that land late and in pieces, and kernels that start early.
#pragma once
#include <array>
#include <functional>
#include <memory>
#include <set>

#include "shadow.h"

namespace fibers {

struct Grid {
    u32 x = 1, y = 1;
};
typedef std::array<u32, 6> Words6;  // what a lane gives to its warp

struct Thread;
struct Block;
struct Kernel;
typedef std::vector<Thread *> Waiting;

// what orders threads: kinds of call sites, each of which the tests leave out in turn
enum class Order {
    WAIT,
    BLOCK_BARRIER,
    NAMED_BARRIER,
    WARP_SYNC,
    CLUSTER_BARRIER,
    MBARRIER,
    RELEASE,
    ACQUIRE,
    FENCE,
    ASYNC_WAIT
};

// a place where threads meet: a barrier, a warp
struct Meeting {
    u32 arrived = 0, generation = 0, expected = 0;
    Clock clock;
    Waiting waiting;
};

struct Warp {
    Meeting sync, gather;
    Words6 given[2][32];
};

struct Mbarrier {
    u32 count = 0, pending = 0, phase = 0;
    int64_t bytes = 0;
    u16 block = 0, agent = 0;
    bool is_fenced = false;  // its initial state is visible to bulk copies
    Epoch init;
    Clock gathering, published;
    Waiting waiting;
};

// a thread's own copy to shared memory, of its group
struct AsyncCopy {
    char *to;
    const char *from;  // or null: zeros
    u32 bytes, group;
};

struct Thread {
    Block *block;
    u16 agent;
    u32 index;
    void *stack_pointer = nullptr, *stack = nullptr;
    bool is_done = false;
    u32 phase_of_cluster = 0, cluster_waits = 0;
    bool arrived_at_cluster = false;
    u32 gathers = 0;
    u32 committed = 0;  // groups of its own copies
    std::vector<AsyncCopy> copies;
    Clock clock;
    Clock at_fence, acquired;       // relaxed atomics after and before a fence
    Clock at_async_fence;
    Site waits_at = {"", 0};
    const char *waits_for = "";
};

struct Block {
    Kernel *kernel;
    u32 number;
    std::vector<char> bytes;
    char *shared;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    Meeting named[16];
    std::map<u64 *, Mbarrier> mbarriers;
    u32 live;
    bool has_triggered = false;
    Clock at_end;
    Counts remote;  // the last access of each agent of another block
};

struct Cluster {
    u32 live, arrived = 0;
    Clock gathering;
    std::vector<Clock> published;  // of each phase
    Waiting waiting;
};

struct Kernel {
    Grid grid;
    u32 num_threads, cluster_size, shared_bytes, shared_cell;
    bool is_early;
    std::function<void()> body;
    u8 number = 0;
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<Cluster> clusters;
    u32 triggered = 0, done = 0;
    bool has_started = false;
    u64 known_at_trigger = 1, known_at_end = 1;  // kernels that were complete for it then
    Counts async_fences;                         // of each thread, its clock at its last fence_async
    Waiting waiting;                             // threads of the next kernel

    bool is_done() const { return has_started && done == blocks.size(); }
};

struct Copy {
    Block *block;
    char *to;
    const char *from;
    u32 bytes;
    u64 *mbarrier;
    u32 phase;
    Site site;
};

class Machine {
  public:
    Shadow shadow;
    Thread *thread = nullptr;  // that runs

    // of the tests
    void reset(u64 seed);
    void launch(Kernel kernel);
    void run();
    void skip(Order order, const std::string &site) { _skipped = {order, site}; }
    std::string sites() const;

    // of the names of memory.cuh
    void touch(Access access, const void *at, size_t bytes, Site site);
    void *remote(const void *shared, u32 rank, Site site);
    void wait_for_previous(Site site);
    void allow_next();
    void block_barrier(Site site);
    void named_barrier(u32 number, u32 threads, Site site);
    void warp_sync(Site site);
    const Words6 *gather(const Words6 &words, Site site);
    void cluster_arrive(Site site);
    void cluster_wait(Site site);
    void mbarrier_init(u64 *at, u32 arrivals, Site site);
    void mbarrier_fence();
    void mbarrier_expect(u64 *at, u32 bytes, Site site);
    void mbarrier_arrive(u64 *at, Site site);
    void mbarrier_wait(u64 *at, u32 parity, Site site);
    void bulk_copy(void *to, const void *from, u32 bytes, u64 *mbarrier, Site site);
    void async_fence();
    void async_copy(void *to, const void *from, u32 bytes, bool is_there, Site site);
    void async_commit();
    void async_wait(u32 left, Site site);
    u32 atomic_add(u32 *at, u32 value, bool releases, bool acquires, Site site);
    u32 atomic_load(const u32 *at, bool acquires, Site site);
    void fence(Site site);

    void main_of_fiber();

  private:
    std::vector<std::unique_ptr<Kernel>> _kernels;
    Waiting _runnable;
    std::vector<Copy> _copies;
    std::vector<void *> _stacks;
    void *_own_stack_pointer = nullptr;
    u64 _random = 1, _progress = 0;
    u32 _budget = 0, _slow_block = 0;
    bool _is_aborted = false;
    std::pair<Order, std::string> _skipped{Order::WAIT, ""};
    std::set<std::pair<int, std::string>> _sites;
    std::set<std::pair<int, u16>> _seen_sites;

    u32 _draw(u32 below);
    bool _leaves_out(Order order, Site site);
    Agent _agent();
    u32 &_own_clock() { return thread->clock.counts.at(thread->block->number, thread->agent); }
    void _tick() { _own_clock()++; }
    void _switch_back();
    void _preempt();
    void _sleep(Waiting &waiting, const char *what, Site site);
    void _wake(Waiting &waiting);
    void _meet(Meeting &meeting, u32 expected, bool orders, const char *what, Site site);
    Mbarrier *_mbarrier(u64 *at, Site site);
    void _settle(Mbarrier &mbarrier);
    void _land();
    void _start(Kernel &kernel, Kernel *previous);
    void _start_kernels();
    void _end_thread();
    void _complete_cluster(Cluster &cluster);
    void _report_deadlock(const char *what);
    void _abort();
};

extern Machine machine;

}  // namespace fibers
