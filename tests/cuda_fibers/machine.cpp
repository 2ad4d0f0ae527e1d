#include "machine.h"

#include <sys/mman.h>

#include <algorithm>

namespace fibers {

Machine machine;

constexpr size_t STACK_BYTES = 128 * 1024;
constexpr u32 MBARRIERS = 64;    // of a block
constexpr u32 PIECE = 64;        // bytes of a bulk copy that land at a time
constexpr u32 WITHOUT_END = ~0u;

// leave this stack, whose pointer is kept at `from`, for another
extern "C" void fibers_switch(void **from, void *to);
extern "C" void fibers_main() { machine.main_of_fiber(); }
#if defined(__x86_64__)
asm(R"(
.text
.globl fibers_switch
.type fibers_switch,@function
fibers_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
static void *new_stack(void *stack) {
    void **top = (void **)((char *)stack + STACK_BYTES - 64);
    top[6] = (void *)fibers_main;  // where `ret` goes, after six registers
    return top;
}
#else
#error "a switch between stacks is written for x86-64 alone"
#endif

u32 Machine::_draw(u32 below) {
    _random ^= _random << 13;
    _random ^= _random >> 7;
    _random ^= _random << 17;
    return (_random >> 20) % below;
}

void Machine::reset(u64 seed) {
    for (auto &kernel : _kernels)
        for (auto &block : kernel->blocks)
            for (Thread &each : block->threads)
                if (each.stack) _stacks.push_back(each.stack);
    _kernels.clear();
    _runnable.clear();
    _copies.clear();
    shadow.reset();
    thread = nullptr;
    _random = (seed + 1) * 0x9E3779B97F4A7C15ull;
    _progress = 0;
    _is_aborted = false;
    _sites.clear();
    _seen_sites.clear();
    _skipped.second.clear();
}

void Machine::launch(Kernel kernel) {
    kernel.number = _kernels.size() + 1;
    if (kernel.number > 62 || kernel.num_threads % 32 || kernel.grid.x % kernel.cluster_size) {
        fprintf(stderr, "a chain has at most 62 kernels, a block whole warps, a grid whole clusters\n");
        abort();
    }
    _kernels.push_back(std::make_unique<Kernel>(std::move(kernel)));
}

void Machine::run() {
    u64 last = 0, idle = 0;
    _slow_block = _draw(8);
    while (!_is_aborted) {
        _start_kernels();
        if (!_copies.empty() && (_runnable.empty() || _draw(4) == 0)) _land();
        if (_runnable.empty()) {
            if (!_copies.empty()) continue;
            auto is_done = [](auto &kernel) { return kernel->is_done(); };
            bool are_done = std::all_of(_kernels.begin(), _kernels.end(), is_done);
            if (!are_done) _report_deadlock("deadlock: no thread can go on");
            break;
        }
        u32 number = _draw(_runnable.size());
        if (_runnable[number]->block->number % 8 == _slow_block && _draw(8)) number = _draw(_runnable.size());
        thread = _runnable[number];
        _runnable[number] = _runnable.back();
        _runnable.pop_back();
        _budget = 1 + _draw(64);
        fibers_switch(&_own_stack_pointer, thread->stack_pointer);
        thread = nullptr;
        if (_progress != last || !_copies.empty()) {
            last = _progress;
            idle = 0;
        } else if (++idle > 1000 + 64 * _runnable.size()) {
            _report_deadlock("deadlock: threads wait for a value that nobody writes");
            break;
        }
    }
}

void Machine::main_of_fiber() {
    thread->block->kernel->body();
    _end_thread();
    _switch_back();
}

void Machine::_switch_back() { fibers_switch(&thread->stack_pointer, _own_stack_pointer); }

void Machine::_abort() {
    _is_aborted = true;
    if (thread) _switch_back();
}

void Machine::_preempt() {
    _progress++;
    if (--_budget) return;
    _runnable.push_back(thread);
    _switch_back();
}

void Machine::_sleep(Waiting &waiting, const char *what, Site site) {
    thread->waits_at = site;
    thread->waits_for = what;
    waiting.push_back(thread);
    _switch_back();
}

void Machine::_wake(Waiting &waiting) {
    _progress++;
    for (Thread *each : waiting) {
        each->waits_for = "";
        _runnable.push_back(each);
    }
    waiting.clear();
}

void Machine::_report_deadlock(const char *what) {
    std::set<std::string> places;
    for (auto &kernel : _kernels)
        for (auto &block : kernel->blocks)
            for (Thread &each : block->threads)
                if (!each.is_done && *each.waits_for)
                    places.insert(std::string(each.waits_for) + " at " + Shadow::text(each.waits_at) + " of kernel " +
                                  std::to_string(kernel->number) + " block " + std::to_string(block->number));
    std::string text = what;
    for (const std::string &place : places)
        if (text.size() < 600) text += "; " + place;
    shadow.fault(text);
}

std::string Machine::sites() const {
    std::string text;
    for (auto &[order, site] : _sites) text += std::to_string(order) + " " + site + "\n";
    return text;
}

// note a call that orders, and say whether the test leaves it out
bool Machine::_leaves_out(Order order, Site site) {
    std::pair<int, u16> seen = {int(order), shadow.site_number(site)};
    if (_seen_sites.insert(seen).second) _sites.insert({int(order), Shadow::text(site)});
    return !_skipped.second.empty() && _skipped.first == order && _skipped.second == Shadow::text(site);
}

Agent Machine::_agent() {
    Thread &t = *thread;
    return {&t.clock, {_own_clock(), u16(t.block->number), t.agent, t.block->kernel->number, 0}};
}

// ---- kernels

void Machine::_start_kernels() {
    Kernel *previous = nullptr;
    bool are_done = true;
    for (auto &each : _kernels) {
        Kernel &kernel = *each;
        if (!kernel.has_started) {
            if (!are_done && !(kernel.is_early && previous->triggered == previous->blocks.size())) return;
            _start(kernel, previous);
        }
        are_done = are_done && kernel.is_done();
        previous = &kernel;
    }
}

void Machine::_start(Kernel &kernel, Kernel *previous) {
    kernel.has_started = true;
    _progress++;
    u32 count = kernel.grid.x * kernel.grid.y;
    u64 known = 1;
    if (previous && kernel.is_early) known = previous->known_at_trigger;
    if (previous && !kernel.is_early) known = (2ull << previous->number) - 1;
    kernel.clusters.resize(count / kernel.cluster_size);
    for (Cluster &cluster : kernel.clusters) cluster.live = kernel.cluster_size * kernel.num_threads;
    for (u32 b = 0; b < count; b++) {
        auto block = std::make_unique<Block>();
        block->kernel = &kernel;
        block->number = b;
        block->bytes.assign(kernel.shared_bytes + 1024, 0x7f);
        block->shared = (char *)(((uintptr_t)block->bytes.data() + 1023) & ~(uintptr_t)1023);
        shadow.add("shared memory", block->shared, kernel.shared_bytes, kernel.shared_cell, false, false);
        block->live = kernel.num_threads;
        block->warps.resize(kernel.num_threads / 32);
        block->threads.resize(kernel.num_threads);
        for (u32 i = 0; i < kernel.num_threads; i++) {
            Thread &t = block->threads[i];
            t.block = block.get();
            t.agent = t.index = i;
            t.clock.counts.at(b, i) = 1;
            t.clock.kernels = known;
            if (_stacks.empty()) {
                int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
                _stacks.push_back(mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0));
            }
            t.stack = _stacks.back();
            _stacks.pop_back();
            t.stack_pointer = new_stack(t.stack);
            _runnable.push_back(&t);
        }
        kernel.blocks.push_back(std::move(block));
    }
}

void Machine::_end_thread() {
    Thread &t = *thread;
    Block &block = *t.block;
    Kernel &kernel = *block.kernel;
    t.is_done = true;
    _progress++;
    if (!t.copies.empty()) shadow.fault("race: a thread ends before its own copies have landed");
    block.at_end.join(t.clock);
    kernel.known_at_end |= t.clock.kernels;
    Cluster &cluster = kernel.clusters[block.number / kernel.cluster_size];
    cluster.live--;
    if (t.arrived_at_cluster && t.phase_of_cluster == cluster.published.size()) cluster.arrived--;  // once
    if (cluster.live && cluster.arrived == cluster.live) _complete_cluster(cluster);
    Meeting &all = block.named[0];
    if (--block.live) {
        if (all.arrived && all.expected == WITHOUT_END && all.arrived == block.live) {
            all.generation++;
            all.arrived = 0;
            for (Thread *each : all.waiting) each->clock.join(all.clock);
            _wake(all.waiting);
        }
        return;
    }
    block.remote.each(kernel.number, [&](Epoch epoch) {
        if (!block.at_end.covers(epoch, kernel.number))
            shadow.fault("race: a block of a cluster ends, and another one may read its shared memory later");
    });
    if (!block.has_triggered) {
        kernel.triggered++;
        kernel.known_at_trigger |= block.at_end.kernels;
    }
    shadow.remove(block.shared);
    if (++kernel.done == kernel.blocks.size()) _wake(kernel.waiting);
}

void Machine::wait_for_previous(Site site) {
    if (_leaves_out(Order::WAIT, site)) return;
    Kernel &kernel = *thread->block->kernel;
    if (kernel.number == 1) return;
    Kernel &previous = *_kernels[kernel.number - 2];
    while (!previous.is_done()) _sleep(previous.waiting, "wait_for_previous_kernel", site);
    thread->clock.kernels |= previous.known_at_end | 1ull << previous.number;
}

void Machine::allow_next() {
    Block &block = *thread->block;
    _preempt();
    if (block.has_triggered) return;
    block.has_triggered = true;
    block.kernel->triggered++;
    block.kernel->known_at_trigger |= thread->clock.kernels;
}

// ---- memory

void Machine::touch(Access access, const void *at, size_t bytes, Site site) {
    _preempt();
    if ((uintptr_t)at % bytes) shadow.fault("misaligned: " + std::to_string(bytes) + " bytes at " + Shadow::text(site));
    if (!shadow.touch(access, at, bytes, _agent(), site)) _abort();
}

void *Machine::remote(const void *shared, u32 rank, Site site) {
    Block &own = *thread->block;
    Kernel &kernel = *own.kernel;
    if (rank >= kernel.cluster_size) {
        shadow.fault("outside: rank " + std::to_string(rank) + " of a cluster at " + Shadow::text(site));
        _abort();
    }
    Block &block = *kernel.blocks[own.number / kernel.cluster_size * kernel.cluster_size + rank];
    if (&block != &own) {
        if (!thread->cluster_waits)
            shadow.fault("race: another block of the cluster may not have begun at " + Shadow::text(site));
        if (!block.live) {
            shadow.fault("race: another block of the cluster has ended at " + Shadow::text(site));
            _abort();
        }
        block.remote.at(own.number, thread->agent) = _own_clock();
    }
    return block.shared + ((const char *)shared - own.shared);
}

u32 Machine::atomic_add(u32 *at, u32 value, bool releases, bool acquires, Site site) {
    releases = releases && !_leaves_out(Order::RELEASE, site);
    acquires = acquires && !_leaves_out(Order::ACQUIRE, site);
    touch(Access::ATOMIC_WRITE, at, 4, site);
    Atomic &atomic = shadow.atomic(at, _agent(), site);
    (acquires ? thread->clock : thread->acquired).join(atomic.released);
    atomic.released.join(releases ? thread->clock : thread->at_fence);
    _tick();
    u32 before = *at;
    *at += value;
    return before;
}

u32 Machine::atomic_load(const u32 *at, bool acquires, Site site) {
    acquires = acquires && !_leaves_out(Order::ACQUIRE, site);
    if (!shadow.touch(Access::ATOMIC_READ, at, 4, _agent(), site)) _abort();
    thread->waits_at = site;
    _runnable.push_back(thread);  // no progress: it may be one of a loop that waits for another value
    _switch_back();
    Atomic &atomic = shadow.atomic(at, _agent(), site);
    (acquires ? thread->clock : thread->acquired).join(atomic.released);
    return *at;
}

void Machine::fence(Site site) {
    _preempt();
    if (_leaves_out(Order::FENCE, site)) return;
    thread->clock.join(thread->acquired);
    thread->at_fence = thread->clock;
    _tick();
}

// ---- barriers

// come together with others: all see what each did before, if that `orders`
void Machine::_meet(Meeting &meeting, u32 expected, bool orders, const char *what, Site site) {
    _progress++;
    if (meeting.arrived && meeting.expected != expected)
        shadow.fault("barrier: threads disagree on how many meet at " + Shadow::text(site));
    if (!meeting.arrived) meeting.clock = Clock();
    meeting.expected = expected;
    if (orders) meeting.clock.join(thread->clock);
    u32 count = expected == WITHOUT_END ? thread->block->live : expected;
    if (++meeting.arrived < count) {
        _sleep(meeting.waiting, what, site);
    } else {
        meeting.arrived = 0;
        meeting.generation++;
        if (orders) {
            for (Thread *each : meeting.waiting) each->clock.join(meeting.clock);
            thread->clock.join(meeting.clock);
        }
        _wake(meeting.waiting);
        _runnable.push_back(thread);
        _switch_back();
    }
    if (orders) _tick();
}

void Machine::block_barrier(Site site) {
    if (!_leaves_out(Order::BLOCK_BARRIER, site))
        _meet(thread->block->named[0], WITHOUT_END, true, "block_barrier", site);
}

void Machine::named_barrier(u32 number, u32 threads, Site site) {
    if (!_leaves_out(Order::NAMED_BARRIER, site))
        _meet(thread->block->named[number], threads, true, "named_barrier", site);
}

void Machine::warp_sync(Site site) {
    if (!_leaves_out(Order::WARP_SYNC, site))
        _meet(thread->block->warps[thread->index / 32].sync, 32, true, "warp_sync", site);
}

// return what all lanes of the warp give, until the next gather; it orders no memory
const Words6 *Machine::gather(const Words6 &words, Site site) {
    Warp &warp = thread->block->warps[thread->index / 32];
    Words6 *given = warp.given[thread->gathers++ & 1];
    given[thread->index % 32] = words;
    _meet(warp.gather, 32, false, "all lanes", site);
    return given;
}

void Machine::_complete_cluster(Cluster &cluster) {
    cluster.arrived = 0;
    cluster.published.push_back(cluster.gathering);
    cluster.gathering = Clock();
    _wake(cluster.waiting);
}

void Machine::cluster_arrive(Site site) {
    _preempt();
    if (_leaves_out(Order::CLUSTER_BARRIER, site)) return;
    Kernel &kernel = *thread->block->kernel;
    Cluster &cluster = kernel.clusters[thread->block->number / kernel.cluster_size];
    if (thread->arrived_at_cluster) shadow.fault("barrier: a thread arrives twice at " + Shadow::text(site));
    thread->arrived_at_cluster = true;
    thread->phase_of_cluster = cluster.published.size();
    cluster.gathering.join(thread->clock);
    _tick();
    if (++cluster.arrived == cluster.live) _complete_cluster(cluster);
}

void Machine::cluster_wait(Site site) {
    if (_leaves_out(Order::CLUSTER_BARRIER, site)) return;
    Kernel &kernel = *thread->block->kernel;
    Cluster &cluster = kernel.clusters[thread->block->number / kernel.cluster_size];
    if (!thread->arrived_at_cluster) shadow.fault("barrier: a thread waits before it arrives at " + Shadow::text(site));
    thread->arrived_at_cluster = false;
    while (cluster.published.size() == thread->phase_of_cluster) _sleep(cluster.waiting, "cluster_wait", site);
    thread->clock.join(cluster.published[thread->phase_of_cluster]);
    thread->cluster_waits++;
}

// ---- mbarriers and bulk copies

Mbarrier *Machine::_mbarrier(u64 *at, Site site) {
    auto found = thread->block->mbarriers.find(at);
    if (found == thread->block->mbarriers.end()) {
        shadow.fault("race: an mbarrier is used before it is initialized at " + Shadow::text(site));
        _abort();
    }
    if (!thread->clock.covers(found->second.init, thread->block->kernel->number))
        shadow.fault("race: an mbarrier is used at " + Shadow::text(site) + ", not ordered after mbarrier_init");
    return &found->second;
}

void Machine::mbarrier_init(u64 *at, u32 arrivals, Site site) {
    touch(Access::WRITE, at, 8, site);
    Block &block = *thread->block;
    Kernel &kernel = *block.kernel;
    Mbarrier mbarrier;
    mbarrier.count = mbarrier.pending = arrivals;
    mbarrier.init = _agent().own;
    mbarrier.block = block.number;
    auto found = block.mbarriers.find(at);
    u32 number = found == block.mbarriers.end() ? block.mbarriers.size() : found->second.agent - kernel.num_threads;
    if (number >= MBARRIERS) shadow.fault("mbarrier: more than 64 of a block at " + Shadow::text(site));
    mbarrier.agent = kernel.num_threads + number % MBARRIERS;
    block.mbarriers[at] = mbarrier;
}

void Machine::mbarrier_fence() {
    for (auto &[_, mbarrier] : thread->block->mbarriers)
        if (mbarrier.init.agent == thread->agent) mbarrier.is_fenced = true;
}

void Machine::_settle(Mbarrier &mbarrier) {
    if (mbarrier.pending || mbarrier.bytes) return;
    mbarrier.phase++;
    mbarrier.pending = mbarrier.count;
    mbarrier.published.join(mbarrier.gathering);
    mbarrier.published.counts.at(mbarrier.block, mbarrier.agent) = mbarrier.phase;
    _wake(mbarrier.waiting);
}

void Machine::mbarrier_expect(u64 *at, u32 bytes, Site site) {
    _mbarrier(at, site)->bytes += bytes;
    mbarrier_arrive(at, site);
}

void Machine::mbarrier_arrive(u64 *at, Site site) {
    _preempt();
    Mbarrier &mbarrier = *_mbarrier(at, site);
    if (_leaves_out(Order::MBARRIER, site)) return;
    if (!mbarrier.pending) {
        shadow.fault("mbarrier: more arrivals than it counts at " + Shadow::text(site));
        _abort();
    }
    mbarrier.gathering.join(thread->clock);
    _tick();
    mbarrier.pending--;
    _settle(mbarrier);
}

void Machine::mbarrier_wait(u64 *at, u32 parity, Site site) {
    _preempt();
    Mbarrier &mbarrier = *_mbarrier(at, site);
    if (_leaves_out(Order::MBARRIER, site)) return;
    while ((mbarrier.phase & 1) == parity) _sleep(mbarrier.waiting, "mbarrier_wait", site);
    thread->clock.join(mbarrier.published);
}

void Machine::bulk_copy(void *to, const void *from, u32 bytes, u64 *at, Site site) {
    _preempt();
    Mbarrier &mbarrier = *_mbarrier(at, site);
    Kernel &kernel = *thread->block->kernel;
    if (bytes % 16 || (uintptr_t)to % 16 || (uintptr_t)from % 16 || !bytes)
        shadow.fault("misaligned: a bulk copy of " + std::to_string(bytes) + " bytes at " + Shadow::text(site));
    if (!mbarrier.is_fenced)
        shadow.fault("race: a bulk copy at " + Shadow::text(site) + " before the mbarrier_init_fence of its mbarrier");
    Epoch end{mbarrier.phase + 1, mbarrier.block, mbarrier.agent, kernel.number, 0};
    Agent agent{&thread->clock, end, &thread->at_async_fence, &kernel.async_fences};
    if (!shadow.touch(Access::READ, from, bytes, agent, site)) _abort();
    if (!shadow.touch(Access::COPY_WRITE, to, bytes, agent, site)) _abort();
    memset(to, 0xff, bytes);
    _copies.push_back({thread->block, (char *)to, (const char *)from, bytes, at, mbarrier.phase, site});
}

void Machine::async_fence() {
    thread->at_async_fence = thread->clock;
    _tick();
    thread->block->kernel->async_fences.at(thread->block->number, thread->agent) = _own_clock();
}

// ---- a thread's own copies, in groups

void Machine::async_copy(void *to, const void *from, u32 bytes, bool is_there, Site site) {
    _preempt();
    Kernel &kernel = *thread->block->kernel;
    if ((uintptr_t)to % bytes || (is_there && (uintptr_t)from % bytes))
        shadow.fault("misaligned: a copy of " + std::to_string(bytes) + " bytes at " + Shadow::text(site));
    if (is_there && !shadow.touch(Access::READ, from, bytes, _agent(), site)) _abort();
    // written by an agent that the thread knows when it has waited
    u16 agent = kernel.num_threads + MBARRIERS + thread->agent;
    Agent copies{&thread->clock, {thread->committed + 1, u16(thread->block->number), agent, kernel.number, 0}};
    if (!shadow.touch(Access::WRITE, to, bytes, copies, site)) _abort();
    memset(to, 0xff, bytes);
    thread->copies.push_back({(char *)to, is_there ? (const char *)from : nullptr, bytes, thread->committed + 1});
}

void Machine::async_commit() { thread->committed++; }

void Machine::async_wait(u32 left, Site site) {
    _preempt();
    if (_leaves_out(Order::ASYNC_WAIT, site) || thread->committed <= left) return;
    u32 done = thread->committed - left;
    auto lands = [&](const AsyncCopy &copy) {
        if (copy.group > done) return false;
        if (copy.from) memcpy(copy.to, copy.from, copy.bytes);
        else memset(copy.to, 0, copy.bytes);
        return true;
    };
    auto &copies = thread->copies;
    copies.erase(std::remove_if(copies.begin(), copies.end(), lands), copies.end());
    u32 agent = thread->block->kernel->num_threads + MBARRIERS + thread->agent;
    thread->clock.counts.at(thread->block->number, agent) = done;
}

void Machine::_land() {
    u32 number = _draw(_copies.size());
    Copy &copy = _copies[number];
    Mbarrier &mbarrier = copy.block->mbarriers[copy.mbarrier];
    if (mbarrier.phase != copy.phase)
        shadow.fault("mbarrier: bytes of the copy at " + Shadow::text(copy.site) + " land in another phase");
    if (!copy.block->live) {
        shadow.fault("race: the copy at " + Shadow::text(copy.site) + " lands after its block has ended");
        return _abort();
    }
    u32 bytes = std::min(copy.bytes, PIECE);
    memcpy(copy.to, copy.from, bytes);
    mbarrier.bytes -= bytes;
    copy.to += bytes;
    copy.from += bytes;
    copy.bytes -= bytes;
    if (!copy.bytes) {
        _copies[number] = _copies.back();
        _copies.pop_back();
    }
    _progress++;
    _settle(mbarrier);
}

}  // namespace fibers

// ---- what the tests call

using fibers::machine;

extern "C" void fibers_reset(uint64_t seed) { machine.reset(seed); }
extern "C" void fibers_tensor(const char *name, void *at, size_t bytes, int cell, int is_constant, int is_written) {
    machine.shadow.add(name, at, bytes, cell, is_constant, is_written);
}
extern "C" void fibers_skip(int order, const char *site) { machine.skip(fibers::Order(order), site); }
extern "C" void fibers_run() { machine.run(); }
static int put(const std::string &text, char *to, int size) { return snprintf(to, size, "%s", text.c_str()); }
extern "C" int fibers_faults(char *to, int size) {
    std::string text;
    for (const std::string &fault : machine.shadow.faults) text += fault + "\n";
    return put(text, to, size);
}
extern "C" int fibers_sites(char *to, int size) { return put(machine.sites(), to, size); }
