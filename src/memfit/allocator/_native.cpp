// The compiled twin of quick.py: the same rules, names and bytes, which tests hold equal after every operation.
//
// A block is a node in a list of its segment's neighbours, and its number is the index of the node, so that copies of an
// allocator know the same blocks. Sizes and addresses are counted in units of 512 bytes. quick.py says what each
// function is for; here stand only the reasons for what differs.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <vector>

namespace {

using i64 = std::int64_t;
using Number = std::uint32_t;  // of a node; 0 is none

constexpr i64 UNIT = 512, MIB = (1 << 20) / UNIT;
constexpr i64 SMALL = MIB, SEGMENT = 2 * MIB, LARGE_SEGMENT = 20 * MIB, LARGEST = i64(1) << 61;
constexpr i64 UNLIMITED = i64(1) << 46, ADDRESS = (i64(1) << 40) - 1, EMPTY_CACHE = -(i64(1) << 62);

enum class State : std::uint8_t { used, free, gap };

struct Node {
    i64 address, size;
    Number before, after;
    State state;
    i64 end() const { return address + size; }
};

struct Key {
    i64 size, address;
    Number node;
    bool operator<(const Key& other) const {
        return size != other.size ? size < other.size : address < other.address;
    }
};

// What ends a malloc; the boundary to Python raises the error of quick.py.
struct OutOfMemory {};
struct Undecided {};
struct TooFar {
    i64 end;
};
struct NoBlock {};

i64 up(i64 value, i64 step) { return (value + step - 1) / step * step; }

void check_address(i64 end) {
    if (end > ADDRESS) throw TooFar{end};
}

struct Pool {
    std::vector<Key> keys;
    std::map<i64, Number> gaps;  // of expandable segments, by address
    i64 slack, granule, next, length = 0, shortest = 0;
    bool any_length = false;

    Pool(i64 slack, i64 granule, i64 capacity) : slack(slack), granule(granule), next(granule ? granule : 1) {
        if (granule) length = length_on(capacity);
    }

    i64 length_on(i64 capacity) const {
        i64 bytes = capacity + capacity / 8;
        return std::max(i64(1), up(bytes, granule * UNIT) / (granule * UNIT)) * granule;
    }

    std::size_t position(i64 size, i64 address) const {
        return std::lower_bound(keys.begin(), keys.end(), Key{size, address, 0}) - keys.begin();
    }
};

struct Core {  // one stream
    std::vector<Node> nodes{Node{}};
    std::vector<Number> spare;
    Pool small, large;
    i64 allocated = 0, allocated_peak = 0, reserved = 0, reserved_peak = 0;  // the last in bytes, the others in units
    i64 least_refused = UNLIMITED, retries = 0;
    bool shared = false;  // the beginning of runs on all cards above the capacity

    Core(bool grows, i64 capacity)
        : small(0, grows ? SEGMENT : 0, capacity), large(grows ? 0 : SMALL, grows ? LARGE_SEGMENT : 0, capacity) {}

    Pool& pool_of(i64 size) { return size > SMALL ? large : small; }

    bool is(Number n, State state) const { return n && nodes[n].state == state; }

    Number node(i64 address, i64 size, Number before, Number after, State state) {
        Number n;
        if (spare.empty()) {
            n = Number(nodes.size());
            nodes.push_back(Node{address, size, before, after, state});
        } else {
            n = spare.back();
            spare.pop_back();
            nodes[n] = Node{address, size, before, after, state};
        }
        if (before) nodes[before].after = n;
        if (after) nodes[after].before = n;
        return n;
    }

    void drop(Number n) {  // its neighbours become neighbours
        const Node& gone = nodes[n];
        if (gone.before) nodes[gone.before].after = gone.after;
        if (gone.after) nodes[gone.after].before = gone.before;
        nodes[n] = Node{0, 0, 0, 0, State::free};
        spare.push_back(n);
    }

    void insert(Pool& pool, Number n) {
        Key key{nodes[n].size, nodes[n].address, n};
        nodes[n].state = State::free;
        pool.keys.insert(std::lower_bound(pool.keys.begin(), pool.keys.end(), key), key);
    }

    void remove(Pool& pool, Number n) {
        pool.keys.erase(pool.keys.begin() + pool.position(nodes[n].size, nodes[n].address));
    }

    Number merge(Pool& pool, Number n) {  // with free neighbours, and insert
        if (Number before = nodes[n].before; is(before, State::free)) {
            remove(pool, before);
            nodes[before].size += nodes[n].size;
            drop(n);
            n = before;
        }
        if (Number after = nodes[n].after; is(after, State::free)) {
            remove(pool, after);
            nodes[n].size += nodes[after].size;
            drop(after);
        }
        insert(pool, n);
        return n;
    }

    void free(Number n) {
        if (n >= nodes.size() || nodes[n].state != State::used || !nodes[n].size) throw NoBlock{};
        allocated -= nodes[n].size;
        merge(pool_of(nodes[n].size), n);
    }

    // ---- expandable segments

    i64 room(const Key& key) const {
        Number after = nodes[key.node].after;
        return key.size + (is(after, State::gap) ? nodes[after].size : 0);
    }

    std::size_t advance(const Pool& pool, std::size_t position) const {
        while (position + 1 < pool.keys.size() && room(pool.keys[position + 1]) < room(pool.keys[position])) position++;
        return position;
    }

    std::size_t best_fit(Pool& pool, std::size_t position) {
        std::size_t longest = advance(pool, position);
        if (pool.any_length) {
            Node& last = nodes[pool.gaps.rbegin()->second];
            i64 size = last.size;
            last.size = pool.granule + pool.shortest - last.address;
            std::size_t shortest = advance(pool, position);
            last.size = size;
            if (shortest != longest) throw Undecided{};
        }
        return longest;
    }

    Number candidate(Pool& pool, i64 wanted) {  // the first of the free blocks and gaps that lie at the lowest address
        for (auto [address, gap] : pool.gaps) {
            Number start = is(nodes[gap].before, State::free) ? nodes[gap].before : gap;
            i64 size = nodes[start].size;
            for (Number n = nodes[start].after; size < wanted && n && nodes[n].state != State::used; n = nodes[n].after)
                size += nodes[n].size;
            if (size >= wanted) return start;
        }
        i64 address = pool.next;
        check_address(address + pool.length);
        pool.next += pool.length + pool.granule;
        return pool.gaps[address] = node(address, pool.length, 0, 0, State::gap);
    }

    template <class Charge>
    Number map_granules(Pool& pool, i64 wanted, Charge charge) {
        Number n = candidate(pool, wanted);
        if (pool.any_length && nodes[n].address + wanted > pool.granule + pool.shortest) throw Undecided{};
        for (;;) {
            i64 have = is(n, State::free) ? nodes[n].size : 0;
            if (have >= wanted) return n;
            Number gap = have ? nodes[n].after : n;
            if (!is(gap, State::gap)) return 0;
            i64 address = nodes[gap].address, size = nodes[gap].size;
            i64 mapped = up(std::min(wanted - have, size), pool.granule);
            if (!charge(mapped)) return 0;
            pool.gaps.erase(address);
            if (mapped < size) {
                pool.gaps[address + mapped] = node(address + mapped, size - mapped, gap, nodes[gap].after, State::gap);
                nodes[gap].size = mapped;
            }
            n = merge(pool, gap);
        }
    }

    i64 release_granules(Pool& pool) {
        i64 released = 0, granule = pool.granule;
        std::vector<Key> keys(pool.keys.begin() + pool.position(granule, 0), pool.keys.end());
        for (const Key& key : keys) {
            i64 stop = key.address + key.size, begin = up(key.address, granule), end = stop / granule * granule;
            if (begin >= end) continue;
            remove(pool, key.node);
            Number gap = key.node;
            if (begin > key.address) {
                gap = node(begin, stop - begin, key.node, nodes[key.node].after, State::gap);
                nodes[key.node].size = begin - key.address;
                insert(pool, key.node);
            }
            if (end < stop) insert(pool, node(end, stop - end, gap, nodes[gap].after, State::free));
            nodes[gap].size = end - begin;
            nodes[gap].state = State::gap;
            pool.gaps[begin] = gap;
            released += end - begin;
        }
        if (!released) return 0;
        for (auto [address, gap] : std::map<i64, Number>(pool.gaps)) {
            Number before = nodes[gap].before;
            if (!is(before, State::gap)) continue;
            nodes[before].size += nodes[gap].size;
            drop(gap);
            pool.gaps.erase(address);
        }
        std::map<i64, Number> merged(pool.gaps);
        for (auto at = merged.rbegin(); at != merged.rend(); ++at) {
            if (nodes[at->second].size != pool.length) continue;
            if (nodes[at->second].end() + granule == pool.next) pool.next = at->first;
            drop(at->second);
            pool.gaps.erase(at->first);
        }
        return released;
    }

    void resize_segment(Pool& pool, i64 capacity) {  // ExpandablePool.copy
        pool.any_length = false;
        pool.length = pool.length_on(capacity);
        if (pool.next > pool.granule) {
            Node& last = nodes[pool.gaps.rbegin()->second];
            last.size = pool.granule + pool.length - last.address;
            pool.next = pool.granule + pool.length + pool.granule;
        }
    }

    // ---- whole segments

    template <class Charge>
    Number map_segment(Pool& pool, i64 wanted, Charge charge) {
        i64 size = wanted <= SMALL ? SEGMENT : wanted < LARGE_SEGMENT / 2 ? LARGE_SEGMENT : up(wanted, SEGMENT);
        if (!charge(size)) return 0;
        check_address(pool.next + size);
        Number n = node(pool.next, size, 0, 0, State::free);
        pool.next += size + 1;
        insert(pool, n);
        return n;
    }

    i64 release_segments(Pool& pool) {
        i64 released = 0;
        auto whole = [&](const Key& key) {
            if (nodes[key.node].before || nodes[key.node].after) return false;
            released += key.size;
            drop(key.node);
            return true;
        };
        pool.keys.erase(std::remove_if(pool.keys.begin(), pool.keys.end(), whole), pool.keys.end());
        return released;
    }

    void release() {
        for (Pool* pool : {&large, &small}) reserved -= pool->granule ? release_granules(*pool) : release_segments(*pool);
    }
};

struct Card {
    i64 capacity;
    std::vector<std::shared_ptr<Core>> streams;
    i64 range_end = 0;  // where the last segment ends, if those of all pools and streams lie one behind the other

    void begin_range() {
        if (range_end) return;
        for (const auto& core : streams) range_end = std::max({range_end, core->small.next, core->large.next});
    }

    i64 reserved() const {
        i64 units = 0;
        for (const auto& core : streams) units += core->reserved;
        return units * UNIT;
    }

    void release() {
        for (const auto& core : streams) core->release();
    }

    bool charge(Core& core, i64 units) {
        i64 after = reserved() + units * UNIT;
        if (after > capacity) {
            core.least_refused = std::min(core.least_refused, after);
            if (core.shared) throw Undecided{};
            return false;
        }
        core.reserved += units;
        for (const auto& other : streams) other->reserved_peak = std::max(other->reserved_peak, after);
        return true;
    }

    std::size_t grow(Core& core, Pool& pool, i64 wanted) {
        auto paid = [&](i64 units) { return charge(core, units); };
        auto map = [&] {
            if (pool.granule) return core.map_granules(pool, wanted, paid);
            if (range_end) pool.next = range_end;
            const Number made = core.map_segment(pool, wanted, paid);
            if (made && range_end) range_end = core.nodes[made].end();
            return made;
        };
        Number n = map();
        if (!n) {
            release();
            for (const auto& other : streams) other->retries++;
            n = map();
        }
        if (!n) throw OutOfMemory{};
        return pool.position(core.nodes[n].size, core.nodes[n].address);
    }

    Number malloc(Core& core, i64 size) {
        if (size <= 0) return 0;
        i64 wanted = (std::min(size, LARGEST) + UNIT - 1) / UNIT;
        Pool& pool = core.pool_of(wanted);
        std::size_t position = pool.position(wanted, 0);
        if (position == pool.keys.size())
            position = grow(core, pool, wanted);
        else if (core.is(core.nodes[pool.keys[position].node].after, State::gap))
            position = core.best_fit(pool, position);
        Number n = pool.keys[position].node;
        pool.keys.erase(pool.keys.begin() + position);
        core.nodes[n].state = State::used;
        if (i64 left = core.nodes[n].size - wanted; left > pool.slack) {
            core.nodes[n].size = wanted;
            core.insert(pool, core.node(core.nodes[n].end(), left, n, core.nodes[n].after, State::free));
        }
        core.allocated += core.nodes[n].size;
        core.allocated_peak = std::max(core.allocated_peak, core.allocated);
        return n;
    }
};

// ---- the classes of Python -----------------------------------------------------------------------------------------

struct Object {
    PyObject_HEAD
    std::shared_ptr<Core> core;
    std::shared_ptr<Card> card;
};

PyTypeObject* base_type;

Object* self_of(PyObject* self) { return reinterpret_cast<Object*>(self); }

PyObject* quick(const char* name) {
    PyObject* module = PyImport_ImportModule("memfit.allocator.quick");
    PyObject* found = module ? PyObject_GetAttrString(module, name) : nullptr;
    Py_XDECREF(module);
    return found;
}

// Call a function of quick.py, which raises; takes over the reference to `args`.
void raise_by(const char* name, PyObject* args) {
    PyObject* function = args ? quick(name) : nullptr;
    PyObject* result = function ? PyObject_Call(function, args, nullptr) : nullptr;
    Py_XDECREF(result);
    Py_XDECREF(function);
    Py_XDECREF(args);
}

// Run a function that may throw; returns false where it did, with the error of Python set. `size`: what was asked for.
template <class Function>
bool guarded(PyObject* self, PyObject* size, Function function) {
    try {
        function();
        return true;
    } catch (const OutOfMemory&) {
        raise_by("refuse", Py_BuildValue("(OO)", self, size));
    } catch (const TooFar& far) {
        raise_by("check_address", Py_BuildValue("(L)", static_cast<long long>(far.end)));
    } catch (const Undecided&) {
        if (PyObject* error = quick("Undecided")) {
            PyErr_SetNone(error);
            Py_DECREF(error);
        }
    } catch (const NoBlock&) {
        PyErr_SetString(PyExc_ValueError, "a block that is not in use cannot be freed");
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    }
    return false;
}

// A number of bytes; one that is too large for a card is as good as another.
bool bytes_of(PyObject* object, i64& size) {
    int overflow = 0;
    size = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow) size = overflow > 0 ? LARGEST : -1;
    return !(size == -1 && !overflow && PyErr_Occurred());
}

PyObject* made(PyTypeObject* type, std::shared_ptr<Core> core, std::shared_ptr<Card> card) {
    PyObject* self = type->tp_alloc(type, 0);
    if (self) {
        new (&self_of(self)->core) std::shared_ptr<Core>(std::move(core));
        new (&self_of(self)->card) std::shared_ptr<Card>(std::move(card));
    }
    return self;
}

PyObject* made_on(PyTypeObject* type, std::shared_ptr<Core> core, i64 capacity) {
    auto card = std::make_shared<Card>(Card{capacity, {core}});
    return made(type, std::move(core), std::move(card));
}

template <bool grows>
PyObject* new_allocator(PyTypeObject* type, PyObject* args, PyObject* words) {
    static const char* names[] = {"capacity", nullptr};
    PyObject* given = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, words, "|O", const_cast<char**>(names), &given)) return nullptr;
    i64 capacity = UNLIMITED;
    if (given != Py_None && !bytes_of(given, capacity)) return nullptr;
    capacity = std::min(capacity, LARGEST);
    PyObject* self = nullptr;
    guarded(nullptr, nullptr, [&] { self = made_on(type, std::make_shared<Core>(grows, capacity), capacity); });
    return self;
}

PyObject* new_beginning(PyTypeObject* type, PyObject* args, PyObject* words) {
    static const char* names[] = {"expandable_segments", nullptr};
    int grows = 0;
    if (!PyArg_ParseTupleAndKeywords(args, words, "$p", const_cast<char**>(names), &grows)) return nullptr;
    PyObject* self = nullptr;
    guarded(nullptr, nullptr, [&] {
        auto core = std::make_shared<Core>(grows, UNLIMITED);
        core->shared = true;
        core->small.any_length = core->large.any_length = grows;
        self = made_on(type, std::move(core), 0);
    });
    return self;
}

PyObject* no_new(PyTypeObject*, PyObject*, PyObject*) {
    PyErr_SetString(PyExc_TypeError, "make a PlainAllocator, GrowingAllocator or Beginning");
    return nullptr;
}

void dealloc(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    self_of(self)->core.~shared_ptr();
    self_of(self)->card.~shared_ptr();
    type->tp_free(self);
    Py_DECREF(type);
}

PyObject* malloc_(PyObject* self, PyObject* wanted) {
    i64 size;
    if (!bytes_of(wanted, size)) return nullptr;
    Number n = 0;
    Object* object = self_of(self);
    if (!guarded(self, wanted, [&] { n = object->card->malloc(*object->core, size); })) return nullptr;
    return PyLong_FromUnsignedLong(n);
}

bool freed(PyObject* self, Core& core, PyObject* block) {  // None is no block either
    if (block == Py_None) return true;
    unsigned long n = PyLong_AsUnsignedLong(block);
    if (n == static_cast<unsigned long>(-1) && PyErr_Occurred()) return false;
    if (!n) return true;
    return guarded(self, nullptr, [&] { core.free(Number(std::min<unsigned long>(n, UINT32_MAX))); });
}

PyObject* free_(PyObject* self, PyObject* block) {
    if (!freed(self, *self_of(self)->core, block)) return nullptr;
    Py_RETURN_NONE;
}

struct Fresh {  // a block that play() allocated
    Number block = 0;
    Py_ssize_t at = 0;  // 1 + the position of its event; 0: there is none
};

PyObject* empty_cache(PyObject* self, PyObject*) {
    if (!guarded(self, nullptr, [&] { self_of(self)->card->release(); })) return nullptr;
    Py_RETURN_NONE;
}

// Put the blocks of events `from` to `to` that are not freed again into `live`, in their order.
bool put(PyObject* live, PyObject* events, Py_ssize_t from, Py_ssize_t to, const std::vector<Fresh>& fresh) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    bool fine = true;
    for (Py_ssize_t at = from; fine && at < to; at++) {
        PyObject* event = PySequence_Fast_GET_ITEM(events, at);
        i64 number = PyLong_AsLongLong(event);
        if (number < 0 || fresh[number].at != at + 1) continue;
        PyObject* block = PyLong_FromUnsignedLong(fresh[number].block);
        fine = block && PyDict_SetItem(live, event, block) == 0;
        Py_XDECREF(block);
    }
    if (fine) PyErr_Restore(type, error, trace);
    return fine;
}

// Most blocks are freed within the call: only the others ever become numbers in `live`. No Python code runs while the
// sequences are read, but that of an error, after which nothing is read.
PyObject* play(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    if (count < 3 || count > 4 || !PyDict_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "play(events, sizes, live, at=0)");
        return nullptr;
    }
    const Py_ssize_t begin = count > 3 ? PyLong_AsSsize_t(args[3]) : 0;
    if (begin < 0) return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_ValueError, "at must not be negative");
    PyObject* events = PySequence_Fast(args[0], "events must be a sequence");
    PyObject* sizes = events ? PySequence_Fast(args[1], "sizes must be a sequence") : nullptr;
    PyObject* live = args[2];
    Object* object = self_of(self);
    std::vector<Fresh> fresh(sizes ? PySequence_Fast_GET_SIZE(sizes) : 0);
    const i64 known = i64(fresh.size());
    Py_ssize_t at = begin;
    bool fine = sizes != nullptr;
    for (; fine && at < PySequence_Fast_GET_SIZE(events); at++) {
        PyObject* event = PySequence_Fast_GET_ITEM(events, at);
        const i64 number = PyLong_AsLongLong(event);
        if (number >= known) PyErr_SetString(PyExc_IndexError, "an event has no size");
        if (!number || number >= known || (number == -1 && PyErr_Occurred())) break;
        if (number > 0) {
            PyObject* wanted = PySequence_Fast_GET_ITEM(sizes, number);
            i64 size;
            if (!bytes_of(wanted, size) || size < 0) break;
            Number n = 0;
            fine = guarded(self, wanted, [&] { n = object->card->malloc(*object->core, size); });
            if (!fine) break;
            fresh[number] = {n, at + 1};
        } else if (number > -known && fresh[-number].at) {
            const Number n = fresh[-number].block;
            fresh[-number] = {};
            if (n) fine = guarded(self, nullptr, [&] { object->core->free(n); });
        } else {
            PyObject* name = PyLong_FromLongLong(-number);
            PyObject* block = name ? PyDict_GetItemWithError(live, name) : nullptr;
            fine = block ? freed(self, *object->core, block) && PyDict_DelItem(live, name) == 0 : !PyErr_Occurred();
            Py_XDECREF(name);
        }
    }
    fine = (!events || !sizes || put(live, events, begin, at, fresh)) && !PyErr_Occurred();
    Py_XDECREF(events);
    Py_XDECREF(sizes);
    return fine ? PyLong_FromSsize_t(at) : nullptr;
}

PyObject* play_ops(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    if (count < 2 || count > 3 || !PyList_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "play_ops(ops, blocks, places=())");
        return nullptr;
    }
    PyObject *ops = PySequence_Fast(args[0], "ops must be a sequence"), *blocks = args[1];
    PyObject* places = count > 2 ? PySequence_Fast(args[2], "places must be a sequence") : PyTuple_New(0);
    bool fine = ops && places;
    Object* object = self_of(self);
    const std::shared_ptr<Card> card = object->card;
    const bool several = fine && PySequence_Fast_GET_SIZE(places) > 0;
    auto core_of = [&](Py_ssize_t number) -> Core* {  // of an allocation
        if (!several) return object->core.get();
        const bool known = number < PySequence_Fast_GET_SIZE(places);
        const Py_ssize_t place = known ? PyLong_AsSsize_t(PySequence_Fast_GET_ITEM(places, number)) : -1;
        if (place >= 0 && place < Py_ssize_t(card->streams.size())) return card->streams[place].get();
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_IndexError, "an allocation has no stream");
        return nullptr;
    };
    for (Py_ssize_t at = 0; fine && at < PySequence_Fast_GET_SIZE(ops); at++) {
        PyObject* op = PySequence_Fast_GET_ITEM(ops, at);
        i64 number;
        if (!(fine = bytes_of(op, number))) break;
        if (number >= 0) {
            Number n = 0;
            Core* core = core_of(PyList_GET_SIZE(blocks));
            fine = core && guarded(self, op, [&] { n = card->malloc(*core, number); });
            PyObject* block = fine ? PyLong_FromUnsignedLong(n) : nullptr;
            fine = block && PyList_Append(blocks, block) == 0;
            Py_XDECREF(block);
        } else if (number == EMPTY_CACHE) {
            fine = guarded(self, nullptr, [&] { card->release(); });
        } else {
            Core* core = core_of(Py_ssize_t(~number));
            PyObject* block = core ? PyList_GetItem(blocks, Py_ssize_t(~number)) : nullptr;
            fine = block && freed(self, *core, block);
        }
    }
    Py_XDECREF(ops);
    Py_XDECREF(places);
    if (!fine) return nullptr;
    Py_RETURN_NONE;
}

// ---- a recorded run: what levels.py says of `restore`, `follow` and `segments`

using Owned = std::unique_ptr<PyObject, void (*)(PyObject*)>;  // a reference; null where an error of Python is set

Owned owned(PyObject* object) { return Owned(object, Py_DecRef); }

PyObject *id_name, *size_name, *stream_name;

// Add a segment: sizes of its pieces in bytes, negative where one is free. Returns the blocks of the others.
PyObject* restore(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    if (count != 2 || !PyList_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "restore(small, sizes)");
        return nullptr;
    }
    const int small = PyObject_IsTrue(args[0]);
    Card& card = *self_of(self)->card;
    Core& core = *self_of(self)->core;
    std::vector<i64> sizes;
    i64 total = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[1]); i++) {
        i64 size = 0;
        if (!bytes_of(PyList_GET_ITEM(args[1], i), size)) return nullptr;
        const bool there = size >= -UNLIMITED && size <= UNLIMITED && size && !(size % UNIT);
        const bool fits = size < 0 || (size > SMALL * UNIT) == !small;  // what is freed goes to the pool of its size
        if (!there || !fits || (total += std::abs(size)) > UNLIMITED) {
            PyErr_SetString(PyExc_ValueError, "a piece is not of the pool");
            return nullptr;
        }
        sizes.push_back(size / UNIT);
    }
    if (small < 0 || sizes.empty()) return small < 0 ? nullptr : PyList_New(0);
    if (core.small.granule) return PyErr_Format(PyExc_TypeError, "expandable segments are not restored");
    card.begin_range();
    std::vector<Number> blocks;
    const bool fine = guarded(self, nullptr, [&] {
        Pool& pool = small ? core.small : core.large;
        i64 address = card.range_end;
        check_address(address + total / UNIT);
        Number last = 0;
        for (i64 size : sizes) {
            last = core.node(address, std::abs(size), last, 0, State::used);
            address += std::abs(size);
            if (size < 0) {
                core.insert(pool, last);
            } else {
                core.allocated += size;
                blocks.push_back(last);
            }
        }
        card.range_end = address;
        core.reserved += total / UNIT;
    });
    Owned list = owned(fine ? PyList_New(0) : nullptr);
    for (Number n : blocks) {
        Owned block = owned(list ? PyLong_FromUnsignedLong(n) : nullptr);
        if (!block || PyList_Append(list.get(), block.get()) < 0) return nullptr;
    }
    return list.release();
}

// Events, their places, live blocks (by id: the place of the stream << 32 | the block) and sizes are Python's: the
// functions called here run no other code of it, and whatever is used later is held.
PyObject* follow(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    if (count != 6 || !PyTuple_Check(args[0]) || !PyDict_Check(args[3]) || !PyDict_Check(args[4]) ||
        !PyTuple_Check(args[5]) || PyTuple_GET_SIZE(args[5]) < 2) {
        PyErr_SetString(PyExc_TypeError, "follow(events, at, stop, live, places, kinds)");
        return nullptr;
    }
    PyObject *events = args[0], *live = args[3], *places = args[4], *kinds = args[5];
    Py_ssize_t at = PyLong_AsSsize_t(args[1]), stop = PyErr_Occurred() ? 0 : PyLong_AsSsize_t(args[2]);
    if (at < 0 || PyErr_Occurred()) return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_ValueError, "at is negative");
    stop = std::min(stop, PyTuple_GET_SIZE(events));
    const std::shared_ptr<Card> card = self_of(self)->card;
    card->begin_range();
    i64 allocated = 0;
    for (const auto& core : card->streams) allocated += core->allocated;
    std::vector<i64> levels[2];
    auto at_place = [&](i64 place) -> Core* {
        if (place >= 0 && place < i64(card->streams.size())) return card->streams[place].get();
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "there is no such stream");
        return nullptr;
    };
    auto malloc = [&](PyObject* event) -> bool {  // false: it is left, or an error is set
        Owned id = owned(PyObject_GetAttr(event, id_name));
        Owned wanted = owned(id ? PyObject_GetAttr(event, size_name) : nullptr);
        Owned stream = owned(wanted ? PyObject_GetAttr(event, stream_name) : nullptr);
        i64 size = 0;
        if (!stream || !bytes_of(wanted.get(), size)) return false;
        if (size < 0 || PyDict_Contains(live, id.get())) return false;
        PyObject* known = PyDict_GetItemWithError(places, stream.get());
        const i64 place = known ? PyLong_AsLongLong(known) : -1;
        Core* core = known ? at_place(place) : nullptr;
        if (!core) return false;
        Number n = 0;
        bool full = false;
        const i64 before = core->allocated;
        const bool fine = guarded(self, wanted.get(), [&] {
            try {
                n = card->malloc(*core, size);
            } catch (const OutOfMemory&) {
                full = true;  // as it will be where it is asked for again
            }
        });
        if (!fine || full) return false;
        allocated += core->allocated - before;
        Owned block = owned(PyLong_FromLongLong(n ? place << 32 | n : 0));
        return block && PyDict_SetItem(live, id.get(), block.get()) == 0;
    };
    auto free = [&](PyObject* event) -> bool {
        Owned id = owned(PyObject_GetAttr(event, id_name));
        PyObject* known = id ? PyDict_GetItemWithError(live, id.get()) : nullptr;
        if (!known) return false;
        const i64 block = known == Py_None ? 0 : PyLong_AsLongLong(known);
        if (block == -1 && PyErr_Occurred()) return false;
        if (block) {
            Core* core = at_place(block >> 32);
            const i64 before = core ? core->allocated : 0;
            if (!core || !guarded(self, nullptr, [&] { core->free(Number(block)); })) return false;
            allocated += core->allocated - before;
        }
        return PyDict_DelItem(live, id.get()) == 0;
    };
    const bool fine = guarded(self, nullptr, [&] {
        for (; at < stop; at++) {
            PyObject *event = PyTuple_GET_ITEM(events, at), *kind = reinterpret_cast<PyObject*>(Py_TYPE(event));
            if (kind == PyTuple_GET_ITEM(kinds, 0)) {
                if (!malloc(event)) break;
            } else if (kind == PyTuple_GET_ITEM(kinds, 1)) {
                if (!free(event)) break;
            } else {
                Py_ssize_t known = 2;
                while (known < PyTuple_GET_SIZE(kinds) && kind != PyTuple_GET_ITEM(kinds, known)) known++;
                if (known == PyTuple_GET_SIZE(kinds)) break;
            }
            levels[0].push_back(allocated * UNIT);
            levels[1].push_back(card->reserved());
        }
    });
    if (!fine || PyErr_Occurred()) return nullptr;
    const char* bytes[2];
    for (int n = 0; n < 2; n++) bytes[n] = reinterpret_cast<const char*>(levels[n].data());
    const auto size = Py_ssize_t(levels[0].size() * sizeof(i64));
    return Py_BuildValue("(ny#y#)", at, size ? bytes[0] : "", size, size ? bytes[1] : "", size);
}

// Returns (address, whether it is of the small pool, [(bytes, block; 0: free)]) of each segment of this stream.
PyObject* segments(PyObject* self, PyObject*) {
    const Core& core = *self_of(self)->core;
    Owned list = owned(PyList_New(0));
    for (std::size_t head = 1; list && head < core.nodes.size(); head++) {
        const Node& first = core.nodes[head];
        if (!first.size || first.before) continue;
        const std::size_t key = core.small.position(first.size, first.address);
        const bool small = first.state == State::used ? first.size <= SMALL
                                                      : key < core.small.keys.size() && core.small.keys[key].node == head;
        Owned pieces = owned(PyList_New(0));
        for (Number n = Number(head); pieces && n; n = core.nodes[n].after) {
            const Node& node = core.nodes[n];
            const unsigned int block = node.state == State::used ? n : 0;
            Owned piece = owned(Py_BuildValue("(LI)", static_cast<long long>(node.size * UNIT), block));
            if (!piece || PyList_Append(pieces.get(), piece.get()) < 0) return nullptr;
        }
        Owned segment = owned(pieces ? Py_BuildValue("(LOO)", static_cast<long long>((first.address - 1) * UNIT),
                                                     small ? Py_True : Py_False, pieces.get())
                                     : nullptr);
        if (!segment || PyList_Append(list.get(), segment.get()) < 0) return nullptr;
    }
    return list.release();
}

PyObject* share_card(PyObject* self, PyObject* others) {
    auto card = std::make_shared<Card>(Card{self_of(self)->card->capacity, {self_of(self)->core}});
    Py_ssize_t count = PyTuple_GET_SIZE(others);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject* other = PyTuple_GET_ITEM(others, i);
        if (!PyObject_TypeCheck(other, base_type)) {
            PyErr_SetString(PyExc_TypeError, "a card is shared among allocators of one kind");
            return nullptr;
        }
        card->streams.push_back(self_of(other)->core);
    }
    self_of(self)->card = card;
    for (Py_ssize_t i = 0; i < count; i++) self_of(PyTuple_GET_ITEM(others, i))->card = card;
    Py_RETURN_NONE;
}

std::shared_ptr<Core> copy_of(const Core& core, i64 capacity) {
    auto copy = std::make_shared<Core>(core);
    copy->least_refused = UNLIMITED;
    copy->retries = 0;
    copy->shared = false;
    for (Pool* pool : {&copy->small, &copy->large})
        if (pool->granule) copy->resize_segment(*pool, capacity);
    return copy;
}

PyObject* copy(PyObject* self, PyObject* given) {
    i64 capacity;
    if (!bytes_of(given, capacity)) return nullptr;
    PyObject* made = nullptr;
    guarded(self, nullptr, [&] { made = made_on(base_type, copy_of(*self_of(self)->core, capacity), capacity); });
    return made;
}

PyObject* copies(PyObject* self, PyObject* given) {
    i64 capacity;
    if (!bytes_of(given, capacity)) return nullptr;
    PyObject* list = PyList_New(0);
    auto copied = [&] {
        auto card = std::make_shared<Card>(Card{capacity, {}});
        for (const auto& core : self_of(self)->card->streams) card->streams.push_back(copy_of(*core, capacity));
        for (const auto& core : card->streams) {
            PyObject* one = made(base_type, core, card);
            if (!one || PyList_Append(list, one) < 0) Py_CLEAR(list);
            Py_XDECREF(one);
            if (!list) return;
        }
    };
    if (list && !guarded(self, nullptr, copied)) Py_CLEAR(list);
    return list;
}

PyObject* reset_peak_stats(PyObject* self, PyObject*) {
    Core& core = *self_of(self)->core;
    core.allocated_peak = core.allocated;
    core.reserved_peak = self_of(self)->card->reserved();
    Py_RETURN_NONE;
}

PyObject* above(PyObject* self, PyObject* given) {
    i64 capacity;
    if (!bytes_of(given, capacity)) return nullptr;
    self_of(self)->card->capacity = capacity;
    for (Pool* pool : {&self_of(self)->core->small, &self_of(self)->core->large})
        if (pool->any_length) pool->shortest = pool->length_on(capacity);
    Py_RETURN_NONE;
}

template <i64 (*value)(const Object&)>
PyObject* get(PyObject* self, void*) {
    return PyLong_FromLongLong(value(*self_of(self)));
}

i64 capacity_(const Object& o) { return o.card->capacity; }
i64 allocated_(const Object& o) { return o.core->allocated * UNIT; }
i64 allocated_peak_(const Object& o) { return o.core->allocated_peak * UNIT; }
i64 reserved_(const Object& o) { return o.card->reserved(); }
i64 reserved_peak_(const Object& o) { return o.core->reserved_peak; }
i64 least_refused_(const Object& o) { return o.core->least_refused; }
i64 retries_(const Object& o) { return o.core->retries; }

template <class Function>
PyCFunction call(Function function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"malloc", malloc_, METH_O, nullptr},
    {"free", free_, METH_O, nullptr},
    {"empty_cache", empty_cache, METH_NOARGS, nullptr},
    {"play", call(play), METH_FASTCALL, nullptr},
    {"play_ops", call(play_ops), METH_FASTCALL, nullptr},
    {"restore", call(restore), METH_FASTCALL, nullptr},
    {"follow", call(follow), METH_FASTCALL, nullptr},
    {"segments", segments, METH_NOARGS, nullptr},
    {"share_card", share_card, METH_VARARGS, nullptr},
    {"copy", copy, METH_O, nullptr},
    {"copies", copies, METH_O, nullptr},
    {"reset_peak_stats", reset_peak_stats, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyMethodDef beginning_methods[] = {{"above", above, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};

PyGetSetDef levels[] = {
    {"capacity", get<capacity_>, nullptr, nullptr, nullptr},
    {"allocated", get<allocated_>, nullptr, nullptr, nullptr},
    {"allocated_peak", get<allocated_peak_>, nullptr, nullptr, nullptr},
    {"reserved", get<reserved_>, nullptr, nullptr, nullptr},
    {"reserved_peak", get<reserved_peak_>, nullptr, nullptr, nullptr},
    {"least_refused", get<least_refused_>, nullptr, nullptr, nullptr},
    {"num_alloc_retries", get<retries_>, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyTypeObject* add_type(PyObject* module, const char* name, newfunc make, PyMethodDef* own, PyGetSetDef* gets) {
    PyType_Slot slots[] = {
        {Py_tp_new, reinterpret_cast<void*>(make)},
        {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
        {Py_tp_methods, own},
        {gets ? Py_tp_getset : 0, gets},
        {0, nullptr},
    };
    PyType_Spec spec = {name, sizeof(Object), 0, static_cast<unsigned>(Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE), slots};
    PyObject* type = PyType_FromSpecWithBases(&spec, reinterpret_cast<PyObject*>(base_type));
    if (!type || PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(type)) < 0) return nullptr;
    return reinterpret_cast<PyTypeObject*>(type);
}

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "The compiled twins of quick.py.", -1, nullptr, nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
    if (const char* pure = std::getenv("MEMFIT_PURE_PYTHON"); pure && *pure) {
        PyErr_SetString(PyExc_ImportError, "MEMFIT_PURE_PYTHON is set");
        return nullptr;
    }
    PyObject* module = PyModule_Create(&definition);
    id_name = PyUnicode_InternFromString("id");
    size_name = PyUnicode_InternFromString("size");
    stream_name = PyUnicode_InternFromString("stream");
    if (!id_name || !size_name || !stream_name) Py_CLEAR(module);
    static PyMethodDef none[] = {{nullptr, nullptr, 0, nullptr}};
    if (!module || !(base_type = add_type(module, "memfit.allocator._native.QuickAllocator", no_new, methods, levels)) ||
        !add_type(module, "memfit.allocator._native.PlainAllocator", new_allocator<false>, none, nullptr) ||
        !add_type(module, "memfit.allocator._native.GrowingAllocator", new_allocator<true>, none, nullptr) ||
        !add_type(module, "memfit.allocator._native.Beginning", new_beginning, beginning_methods, nullptr)) {
        Py_XDECREF(module);
        return nullptr;
    }
    return module;
}
