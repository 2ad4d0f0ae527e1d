// Who wrote and read each cell of memory, and which accesses are ordered: vector clocks of FastTrack (Flanagan and
// Freund, 2009), a clock for each thread of a kernel, and whole kernels for what ran before it.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

namespace fibers {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned u32;
typedef unsigned long long u64;

// a line of a source that calls a function of memory.cuh
struct Site {
    const char *file;
    int line;
};

// an access: of an agent (a thread of a block, or the bulk copies of an mbarrier of it), at a value of its clock
struct Epoch {
    u32 clock = 0;  // 0: there was no access
    u16 block = 0, agent = 0;
    u8 kernel = 0;  // 0: the host
    u8 flags = 0;
};
constexpr u8 ATOMIC = 1, GENERIC = 2, CONSTANT = 4;

// a value for each agent of a kernel; only blocks with any have memory
struct Counts {
    std::vector<std::vector<u32>> blocks;

    u32 of(u32 block, u32 agent) const {
        return block < blocks.size() && agent < blocks[block].size() ? blocks[block][agent] : 0;
    }
    u32 &at(u32 block, u32 agent) {
        if (blocks.size() <= block) blocks.resize(block + 1);
        if (blocks[block].size() <= agent) blocks[block].resize(agent + 1);
        return blocks[block][agent];
    }
    void join(const Counts &other) {
        if (blocks.size() < other.blocks.size()) blocks.resize(other.blocks.size());
        for (size_t b = 0; b < other.blocks.size(); b++) {
            size_t count = other.blocks[b].size();
            if (blocks[b].size() < count) blocks[b].resize(count);
            u32 *own = blocks[b].data();
            const u32 *from = other.blocks[b].data();
            for (size_t i = 0; i < count; i++) own[i] = own[i] > from[i] ? own[i] : from[i];
        }
    }
    // call `use(epoch)` for each of a kernel
    template <class F> void each(u8 kernel, F use) const {
        for (size_t b = 0; b < blocks.size(); b++)
            for (size_t i = 0; i < blocks[b].size(); i++)
                if (blocks[b][i]) use(Epoch{blocks[b][i], u16(b), u16(i), kernel, 0});
    }
};

// what happened before: of the own kernel up to a clock of each agent, and other kernels as a whole
struct Clock {
    Counts counts;
    u64 kernels = 1;  // a bit for each kernel that is complete and visible; bit 0 is the host

    void join(const Clock &other) {
        kernels |= other.kernels;
        counts.join(other.counts);
    }
    bool covers(const Epoch &epoch, u8 kernel) const {
        if (epoch.kernel != kernel) return kernels >> epoch.kernel & 1;
        return epoch.clock <= counts.of(epoch.block, epoch.agent);
    }
};

// readers of a cell that are not ordered among themselves
struct Readers {
    Counts clocks;
    u16 site = 0;
    u8 kernel = 0;
    u32 next = 0;
};

struct Cell {
    Epoch write, read;
    u32 readers = 0;  // a list of `Readers`, or 0
    u16 write_site = 0, read_site = 0;
};

enum class Access { READ, READ_CONSTANT, WRITE, ATOMIC_READ, ATOMIC_WRITE, COPY_WRITE };

// what atomics of one place order
struct Atomic {
    Clock released;
    Counts accesses;  // the last of each agent
    u8 kernel = 0;
};

// memory that kernels may touch: a tensor, or the shared memory of a block
struct Region {
    std::string name;
    char *begin;
    size_t bytes;
    int shift;  // a cell has 2^shift bytes
    bool is_constant;
    std::vector<Cell> cells;
};

// who makes an access: what it knows, and the epoch that is noted
struct Agent {
    const Clock *clock;
    Epoch own;
    // of a bulk copy: what its thread knew at its last fence_async, and at which clocks the threads fenced
    const Clock *fenced = nullptr;
    const Counts *fences = nullptr;
};

class Shadow {
  public:
    std::vector<std::string> faults;

    void reset() { *this = Shadow(); }

    Region *add(const std::string &name, void *begin, size_t bytes, int cell_bytes, bool is_constant, bool is_written) {
        int shift = cell_bytes >= 4 ? 2 : cell_bytes >= 2 ? 1 : 0;
        Region region{name, (char *)begin, bytes, shift, is_constant, std::vector<Cell>((bytes >> shift) + 1)};
        for (Cell &cell : region.cells) cell.write.clock = is_written;
        return &(_regions[(char *)begin] = std::move(region));
    }
    void remove(void *begin) {
        _regions.erase((char *)begin);
        _last = nullptr;
    }

    // record an access, and report it where it is not ordered after those that it conflicts with; false: no such memory
    bool touch(Access access, const void *at, size_t bytes, const Agent &agent, Site site) {
        Region *region = _region_of((const char *)at, bytes);
        auto what = [&] { return std::to_string(bytes) + " bytes at " + text(site); };
        if (!region) {
            fault("outside: " + what() + " are in no tensor and in no shared memory");
            return false;
        }
        bool is_write = access == Access::WRITE || access == Access::ATOMIC_WRITE || access == Access::COPY_WRITE;
        if (region->is_constant && is_write) fault("constant: " + region->name + " is written at " + text(site));
        if (region->is_constant) return true;
        size_t first = ((const char *)at - region->begin) >> region->shift;
        size_t last = ((const char *)at - region->begin + bytes - 1) >> region->shift;
        if (bytes < (1u << region->shift)) fault("narrow: " + what() + ", in cells of more, in " + region->name);
        u16 number = site_number(site);
        for (size_t i = first; i <= last; i++) _touch_cell(access, *region, i, agent, number);
        return true;
    }

    // atomics of one place; what other kernels did there must be over
    Atomic &atomic(const void *at, const Agent &agent, Site site) {
        Atomic &found = _atomics[at];
        u8 kernel = agent.own.kernel;
        if (found.kernel != kernel) {
            if (found.kernel && !(agent.clock->kernels >> found.kernel & 1))
                fault("race: an atomic at " + text(site) + " meets those of a kernel that may still run");
            found = Atomic();
            found.kernel = kernel;
        }
        found.accesses.at(agent.own.block, agent.own.agent) = agent.own.clock;
        return found;
    }

    void fault(const std::string &text) {
        for (const std::string &other : faults)
            if (other.substr(0, other.find('(')) == text.substr(0, text.find('('))) return;
        if (faults.size() < 20) faults.push_back(text);
    }
    u16 site_number(Site site) {
        auto &known = _recent[(site.line * 31 + ((uintptr_t)site.file >> 3)) % 256];
        if (known.first.line == site.line && known.first.file == site.file) return known.second;
        u16 number = 1;
        auto is_it = [&](Site other) { return other.line == site.line && !strcmp(other.file, site.file); };
        while (number < _sites.size() && !is_it(_sites[number])) number++;
        if (number == _sites.size()) _sites.push_back(site);
        known = {site, number};
        return number;
    }
    static std::string text(Site site) {
        const char *slash = strrchr(site.file, '/');
        return std::string(slash ? slash + 1 : site.file) + ":" + std::to_string(site.line);
    }

  private:
    std::map<char *, Region> _regions;
    Region *_last = nullptr;
    std::vector<Readers> _readers = std::vector<Readers>(1);
    std::vector<u32> _free_readers;
    std::unordered_map<const void *, Atomic> _atomics;
    std::vector<Site> _sites = {{"the host", 0}};
    std::pair<Site, u16> _recent[256] = {};

    Region *_region_of(const char *at, size_t bytes) {
        auto holds = [&](Region *region) { return at >= region->begin && at + bytes <= region->begin + region->bytes; };
        if (_last && holds(_last)) return _last;
        auto next = _regions.upper_bound((char *)at);
        if (next == _regions.begin()) return nullptr;
        Region *region = &std::prev(next)->second;
        return holds(region) ? _last = region : nullptr;
    }

    struct At {
        const Region &region;
        size_t cell;
        const Agent &agent;
        u16 site;
    };

    void _race(const char *before, Epoch epoch, u16 before_site, const char *now, const At &at) {
        auto who = [](Epoch e) {
            return "kernel " + std::to_string(e.kernel) + " block " + std::to_string(e.block) + " agent " +
                   std::to_string(e.agent);
        };
        fault("race: " + at.region.name + " " + before + " at " + text(_sites[before_site]) + ", " + now + " at " +
              text(_sites[at.site]) + " without order (byte " + std::to_string(at.cell << at.region.shift) + ": " +
              who(epoch) + ", " + who(at.agent.own) + ")");
    }

    void _touch_cell(Access access, Region &region, size_t index, const Agent &agent, u16 site) {
        Cell &cell = region.cells[index];
        At at{region, index, agent, site};
        const u8 kernel = agent.own.kernel;
        bool is_atomic = access == Access::ATOMIC_READ || access == Access::ATOMIC_WRITE;
        bool is_read = access == Access::READ || access == Access::READ_CONSTANT || access == Access::ATOMIC_READ;
        bool is_ordered = !cell.write.clock || agent.clock->covers(cell.write, kernel);
        if (!is_ordered && !(is_atomic && cell.write.flags & ATOMIC))
            _race("written", cell.write, cell.write_site, is_read ? "read" : "written", at);
        if (is_read) {
            if (!cell.write.clock) fault("unwritten: " + region.name + " read at " + text(_sites[site]));
            if (!is_atomic) _add_reader(cell, agent, site, access == Access::READ_CONSTANT ? CONSTANT : 0);
            return;
        }
        bool is_copy = access == Access::COPY_WRITE;
        if (is_copy && cell.write.flags & GENERIC && cell.write.kernel == kernel &&
            !agent.fenced->covers(cell.write, kernel) &&
            agent.fences->of(cell.write.block, cell.write.agent) <= cell.write.clock)
            _race("written", cell.write, cell.write_site, "copied over without fence_async", at);
        _check_readers(cell, at);
        if (!is_atomic && cell.write.flags & ATOMIC) _check_atomics(cell, at);
        cell.write = agent.own;
        cell.write.flags = is_copy ? 0 : is_atomic ? ATOMIC : GENERIC;
        cell.write_site = site;
    }

    void _check_atomics(const Cell &cell, const At &at) {
        auto found = _atomics.find(at.region.begin + (at.cell << at.region.shift));
        if (found == _atomics.end()) return;
        const Atomic &atomic = found->second;
        atomic.accesses.each(atomic.kernel, [&](Epoch epoch) {
            if (!at.agent.clock->covers(epoch, at.agent.own.kernel))
                _race("used by an atomic", epoch, cell.write_site, "written", at);
        });
        _atomics.erase(found);
    }

    void _add_reader(Cell &cell, const Agent &agent, u16 site, u8 flags) {
        Epoch own = agent.own;
        own.flags = u8(flags | (cell.read.kernel == own.kernel ? cell.read.flags : 0));
        if (!cell.readers) {
            if (!cell.read.clock || agent.clock->covers(cell.read, own.kernel)) {
                cell.read = own;
                cell.read_site = site;
                return;
            }
            cell.readers = _new_readers(cell.read.kernel, 0);
            _set(_readers[cell.readers], cell.read, cell.read_site);
        }
        cell.read.flags |= flags;
        u32 found = cell.readers;
        while (found && _readers[found].kernel != own.kernel) found = _readers[found].next;
        if (!found) found = cell.readers = _new_readers(own.kernel, cell.readers);
        _set(_readers[found], own, site);
    }
    static void _set(Readers &readers, const Epoch &epoch, u16 site) {
        readers.clocks.at(epoch.block, epoch.agent) = epoch.clock;
        readers.site = site;
    }
    u32 _new_readers(u8 kernel, u32 next) {
        u32 number = _readers.size();
        if (_free_readers.empty()) {
            _readers.emplace_back();
        } else {
            number = _free_readers.back();
            _free_readers.pop_back();
        }
        for (auto &block : _readers[number].clocks.blocks) block.clear();
        _readers[number].kernel = kernel;
        _readers[number].next = next;
        return number;
    }

    // a write has to come after all reads, and after none that took the memory as constant
    void _check_readers(Cell &cell, const At &at) {
        const Clock &clock = *at.agent.clock;
        const u8 kernel = at.agent.own.kernel;
        if (cell.read.flags & CONSTANT && cell.read.kernel == kernel)
            _race("read as a constant", cell.read, cell.read_site, "written", at);
        if (!cell.readers && cell.read.clock && !clock.covers(cell.read, kernel))
            _race("read", cell.read, cell.read_site, "written", at);
        for (u32 number = cell.readers; number;) {
            Readers &readers = _readers[number];
            readers.clocks.each(readers.kernel, [&](Epoch epoch) {
                if (!clock.covers(epoch, kernel)) _race("read", epoch, readers.site, "written", at);
            });
            _free_readers.push_back(number);
            number = readers.next;
        }
        cell.readers = 0;
        cell.read = Epoch();
    }
};

}  // namespace fibers
