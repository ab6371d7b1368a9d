// The compiled twin of pickles.Parser: the same opcodes, results and refusals, which tests hold equal.
//
// An opcode only ever makes numbers, text, lists, dicts and entries; what is refused, and in which words, is decided in
// pickles.py. Every number that a file gives is compared with what there is before it is used, memory grows only with
// bytes that were read, and nothing recurses. Errors of Python travel as the exception Failed.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <utility>
#include <vector>

namespace {

using i64 = std::int64_t;
using u64 = std::uint64_t;
using Size = std::size_t;

struct Failed {};  // an error of Python is set

class Ref {  // an owned reference
    PyObject* object = nullptr;

public:
    Ref() = default;
    Ref(Ref&& other) noexcept : object(std::exchange(other.object, nullptr)) {}
    Ref& operator=(Ref&& other) noexcept {
        std::swap(object, other.object);
        return *this;
    }
    ~Ref() { Py_XDECREF(object); }
    PyObject* get() const { return object; }
    PyObject* release() { return std::exchange(object, nullptr); }
    explicit operator bool() const { return object; }

    static Ref owned(PyObject* object) {  // a new reference, or an error that is set
        if (!object) throw Failed{};
        Ref ref;
        ref.object = object;
        return ref;
    }
    static Ref to(PyObject* object) {
        Py_INCREF(object);
        return owned(object);
    }
};

[[noreturn]] void damaged(PyObject* kind, const char* what) {
    PyErr_SetString(kind, what);
    throw Failed{};
}

struct Item {
    Ref object;
    Size place = NOWHERE;  // in the memo
    bool shared = false;   // a list that stands for all equal ones, to which nothing may be added
    bool word = false;     // an integer of 64 bits; where it is not set, it may be one all the same
    static constexpr Size NOWHERE = ~Size(0);

    Item() = default;
    explicit Item(Ref object, Size place = NOWHERE, bool shared = false)
        : object(std::move(object)), place(place), shared(shared) {}
};

enum Field { ACTION, SIZE, ADDR, STREAM, TIME, DEVICE_FREE, POOL, METADATA, FRAMES, FIELDS, OTHER = FIELDS };
constexpr const char* NAMES[FIELDS] = {"action",      "size",    "addr",          "stream", "time_us",
                                       "device_free", "pool_id", "user_metadata", "frames"};

constexpr Size LONGEST_LONG = 9, MOST_KEYS = 64, SLOTS = 1 << 12, STACK_SLOTS = 1 << 12;

struct Parser {
    Ref more, rules, entry, free_requested, freed;  // pieces of the file; pickles.py, and what is used of it often
    Ref zero, no_pool, no_text, no_frames;          // defaults of an entry
    Size chunk, ahead;
    std::string content;
    Size at = 0;
    bool ended = false, keeps_event = true;
    std::vector<Item> items;
    std::vector<Ref> memo;
    std::vector<bool> shared;  // of the memo's items
    std::vector<Size> marks;
    std::vector<std::pair<Ref, Field>> keys;                        // by identity
    std::vector<std::pair<i64, Ref>> integers{SLOTS};               // equal integers are one object; it stays in the cache
    std::vector<std::pair<Ref, Ref>> recent{STACK_SLOTS};           // of `stacks`
    Ref stacks = Ref::owned(PyDict_New());                          // the bytes of a stack -> its list
    Ref pool;                                                       // the last entry's

    Parser(PyObject* more, PyObject* rules)
        : more(Ref::to(more)), rules(Ref::to(rules)), entry(rule("TraceEntry")), free_requested(rule("FREE_REQUESTED")),
          freed(Ref::owned(PyObject_GetAttrString(free_requested.get(), "action"))), zero(Ref::owned(PyLong_FromLong(0))),
          no_pool(Ref::owned(Py_BuildValue("(ii)", 0, 0))), no_text(Ref::owned(PyUnicode_New(0, 0))),
          no_frames(Ref::owned(PyTuple_New(0))), chunk(PyLong_AsSize_t(rule("CHUNK").get())),
          ahead(PyLong_AsSize_t(rule("AHEAD").get())) {
        if (PyErr_Occurred()) throw Failed{};
    }

    Ref rule(const char* name) const { return Ref::owned(PyObject_GetAttrString(rules.get(), name)); }

    [[noreturn]] void raise(Ref error) const {
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.get())), error.get());
        throw Failed{};
    }

    // --- the file ---

    void read_more(Size needed) {
        content.erase(0, at);
        at = 0;
        while (!ended && content.size() < needed + chunk) {
            Ref piece = Ref::owned(PyObject_CallNoArgs(more.get()));
            char* bytes;
            Py_ssize_t size;
            if (PyBytes_AsStringAndSize(piece.get(), &bytes, &size) < 0) throw Failed{};
            content.append(bytes, size);
            ended = !size;
        }
        if (content.size() < needed) raise(Ref::owned(PyObject_CallNoArgs(rule("too_early").get())));
    }

    const unsigned char* take(Size number) {  // valid until the next call
        if (content.size() - at < number) read_more(number);
        at += number;
        return reinterpret_cast<const unsigned char*>(content.data()) + at - number;
    }

    static u64 little(const unsigned char* bytes, Size size) {
        u64 value = 0;
        for (Size n = 0; n < size; ++n) value |= u64(bytes[n]) << (8 * n);
        return value;
    }

    Size number(Size size) { return Size(little(take(size), size)); }

    // --- items ---

    Size base() const { return marks.empty() ? 0 : marks.back(); }

    Item& top() {
        if (items.size() == base()) damaged(PyExc_IndexError, "no item");
        return items.back();
    }

    void push(Ref object) { items.emplace_back(std::move(object)); }

    Item pop() {
        Item item = std::move(top());
        items.pop_back();
        return item;
    }

    Size marked() {  // where the items since the last mark begin
        if (marks.empty()) damaged(PyExc_IndexError, "no mark");
        Size begin = marks.back();
        marks.pop_back();
        return begin;
    }

    void put(Size place) {
        if (place != memo.size()) raise(Ref::owned(PyObject_CallNoArgs(rule("out_of_order").get())));
        Item& item = top();
        item.place = place;
        memo.push_back(Ref::to(item.object.get()));
        shared.push_back(item.shared);
    }

    PyObject* remembered(Size place) const {
        if (place >= memo.size()) damaged(PyExc_IndexError, "nothing is remembered there");
        return memo[place].get();
    }

    void get(Size place) {
        Ref object = Ref::to(remembered(place));
        items.emplace_back(std::move(object), place, shared[place]);
    }

    // --- numbers and text ---

    void integer(i64 value) {
        auto& [known, object] = integers[(u64(value) * 0x9E3779B97F4A7C15u) >> 52];
        static_assert(SLOTS == 1 << 12);
        if (!object || known != value) {
            known = value;
            object = Ref::owned(PyLong_FromLongLong(value));
        }
        push(Ref::to(object.get()));
        items.back().word = true;
    }

    void long_integer() {
        Size size = number(1);
        if (!size || size > LONGEST_LONG) raise(Ref::owned(PyObject_CallFunction(rule("long_integer").get(), "n", size)));
        const unsigned char* bytes = take(size);
        bool negative = bytes[size - 1] & 0x80;
        if (size <= 8) {
            u64 value = little(bytes, size);
            if (negative && size < 8) value |= ~u64(0) << (8 * size);
            return integer(i64(value));
        }
        Ref low = Ref::owned(PyLong_FromUnsignedLongLong(little(bytes, 8)));
        Ref high = Ref::owned(PyLong_FromLong(static_cast<signed char>(bytes[8])));
        Ref shift = Ref::owned(PyLong_FromLong(64));
        high = Ref::owned(PyNumber_Lshift(high.get(), shift.get()));
        push(Ref::owned(PyNumber_Or(high.get(), low.get())));
    }

    void real() {
        const unsigned char* bytes = take(8);
        u64 bits = 0;
        for (int n = 0; n < 8; ++n) bits = bits << 8 | bytes[n];
        double value;
        std::memcpy(&value, &bits, sizeof value);
        push(Ref::owned(PyFloat_FromDouble(value)));
    }

    void text(Size size) {
        Size length = number(size);
        const char* bytes = reinterpret_cast<const char*>(take(length));
        push(Ref::owned(PyUnicode_DecodeUTF8(bytes, Py_ssize_t(length), "surrogatepass")));
    }

    // --- lists ---

    void gather(Size begin) {  // a list of the items from there on, in place of a tuple
        Ref list = Ref::owned(PyList_New(Py_ssize_t(items.size() - begin)));
        for (Size n = begin; n < items.size(); ++n)
            PyList_SET_ITEM(list.get(), Py_ssize_t(n - begin), items[n].object.release());
        items.resize(begin);
        push(std::move(list));
    }

    void gather_last(Size number) {
        if (items.size() - base() < number) damaged(PyExc_IndexError, "a tuple of fewer items");
        gather(items.size() - number);
    }

    void extend(Size begin) {
        if (begin == base()) damaged(PyExc_IndexError, "no list");
        const Item& list = items[begin - 1];
        if (!PyList_CheckExact(list.object.get()) || list.shared) damaged(PyExc_TypeError, "items of no list");
        for (Size n = begin; n < items.size(); ++n)
            if (PyList_Append(list.object.get(), items[n].object.get()) < 0) throw Failed{};
        items.resize(begin);
    }

    void begin_list() {
        const char *begin = content.data() + at, *end = content.data() + content.size(), *p = begin;
        Size put_size = p == end ? 0 : *p == '\x94' ? 1 : *p == 'q' ? 2 : *p == 'r' ? 5 : 0;
        if (put_size && Size(end - p) > put_size && (p[put_size] == '(' || p[put_size] == 'u')) {
            const char* gets = p += put_size;
            if (*p == '(')
                for (++p; p < end && (*p == 'h' || *p == 'j');) p += *p == 'h' ? 2 : 5;
            bool whole = end - p > 1 && *p == 'e' && p - gets > 1 && p[1] != '(';  // else more of its items may follow
            if (whole || *gets == 'u') {  // an empty list, which ends a dict, has no bytes
                p += whole;
                items.emplace_back(stack(gets, Size(p - gets)), Item::NOWHERE, true);
                const auto* place = reinterpret_cast<const unsigned char*>(begin) + 1;
                at += Size(p - begin);
                return put(put_size == 1 ? memo.size() : Size(little(place, put_size - 1)));
            }
        }
        push(Ref::owned(PyList_New(0)));
    }

    Ref stack(const char* gets, Size size) {  // "(", the opcodes that get its frames from the memo, and "e"
        u64 hash = size, word;
        for (Size n = 0; n + 8 <= size; n += 8) {
            std::memcpy(&word, gets + n, 8);
            hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
            hash ^= hash >> 32;
        }
        auto& [key, list] = recent[hash % STACK_SLOTS];
        if (key && Size(PyBytes_GET_SIZE(key.get())) == size && !std::memcmp(PyBytes_AS_STRING(key.get()), gets, size))
            return Ref::to(list.get());
        Ref bytes = Ref::owned(PyBytes_FromStringAndSize(gets, Py_ssize_t(size)));
        PyObject* known = PyDict_GetItemWithError(stacks.get(), bytes.get());  // its hash nobody can foresee
        if (!known && PyErr_Occurred()) throw Failed{};
        Ref found = known ? Ref::to(known) : Ref::owned(PyList_New(0));
        if (!known) {
            const auto* p = reinterpret_cast<const unsigned char*>(gets) + 1;
            for (; size && *p != 'e'; p += *p == 'h' ? 2 : 5)
                if (PyList_Append(found.get(), remembered(Size(little(p + 1, *p == 'h' ? 1 : 4)))) < 0)
                    throw Failed{};
            if (PyDict_SetItem(stacks.get(), bytes.get(), found.get()) < 0) throw Failed{};
        }
        key = std::move(bytes);
        list = Ref::to(found.get());
        return found;
    }

    // --- dicts and events ---

    Field field_of(PyObject* key) {
        for (const auto& [known, field] : keys)
            if (known.get() == key) return field;
        int field = 0;
        while (field < FIELDS && PyUnicode_CompareWithASCIIString(key, NAMES[field])) ++field;
        if (keys.size() < MOST_KEYS) keys.emplace_back(Ref::to(key), Field(field));
        return Field(field);
    }

    void set_items(Size begin) {  // keys and values, of the dict below them
        if (begin == base()) damaged(PyExc_IndexError, "no dict");
        Item& below = items[begin - 1];
        PyObject* data = below.object.get();
        const Item* fields[FIELDS] = {};
        bool dict = PyDict_CheckExact(data);
        for (Size n = begin; dict && n < items.size(); n += 2) {
            dict = PyUnicode_CheckExact(items[n].object.get());
            if (!dict || n + 1 == items.size()) break;
            if (Field field = field_of(items[n].object.get()); field != OTHER) fields[field] = &items[n + 1];
        }
        if (!dict) damaged(PyExc_TypeError, "keys that are no text, or of no dict");
        if ((items.size() - begin) % 2) damaged(PyExc_ValueError, "a key without a value");
        Ref made = keeps_event || PyDict_GET_SIZE(data) ? Ref() : usual(fields);
        if (!made) {
            for (Size n = begin; n < items.size(); n += 2)
                if (PyDict_SetItem(data, items[n].object.get(), items[n + 1].object.get()) < 0) throw Failed{};
            Ref key = Ref::owned(PyUnicode_FromString(NAMES[ACTION]));
            int event = PyDict_Contains(data, key.get());
            if (event < 0) throw Failed{};
            if (event) made = Ref::owned(PyObject_CallOneArg(rule("entry_of").get(), data));
        }
        if (made && !std::exchange(keeps_event, false)) {
            if (below.place != Item::NOWHERE) memo[below.place] = Ref::to(made.get());
            PyDict_Clear(data);
            below.object = std::move(made);
        }
        items.resize(begin);
    }

    static bool is_integer(PyObject* value) {
        int beyond = 0;
        if (!PyLong_CheckExact(value)) return false;
        PyLong_AsLongLongAndOverflow(value, &beyond);
        return !beyond;
    }

    Ref usual(const Item* const* fields) {  // the entry of usual values; null where there are others, or no event
        auto object = [&](Field field) { return fields[field] ? fields[field]->object.get() : nullptr; };
        PyObject *action = object(ACTION), *pair = object(POOL);
        if (!action || !PyUnicode_CheckExact(action)) return {};
        for (Field field : {SIZE, ADDR, STREAM, TIME, DEVICE_FREE})
            if (fields[field] && !fields[field]->word && !is_integer(object(field))) return {};
        if (pair && (!PyList_CheckExact(pair) || PyList_GET_SIZE(pair) != 2 || !is_integer(PyList_GET_ITEM(pair, 0)) ||
                     !is_integer(PyList_GET_ITEM(pair, 1))))
            return {};
        if (int differs = PyUnicode_Compare(action, freed.get()); !differs) return Ref::to(free_requested.get());
        if (pair) {
            Ref tuple = Ref::owned(PyList_AsTuple(pair));
            int same = pool ? PyObject_RichCompareBool(pool.get(), tuple.get(), Py_EQ) : 0;
            if (same < 0) throw Failed{};
            if (!same) pool = std::move(tuple);
        }
        auto given = [&](Field field, const Ref& other) { return fields[field] ? object(field) : other.get(); };
        PyObject* values[FIELDS] = {
            action, given(SIZE, zero), given(ADDR, zero), given(STREAM, zero), given(TIME, zero),
            given(DEVICE_FREE, zero), pair ? pool.get() : no_pool.get(), given(METADATA, no_text), given(FRAMES, no_frames),
        };
        return Ref::owned(PyObject_Vectorcall(entry.get(), values, FIELDS, nullptr));
    }

    [[noreturn]] void refuse(unsigned char code) {
        Ref last = Ref::owned(PyList_New(0));
        for (Size n = items.size() - std::min<Size>(items.size() - base(), 2); n < items.size(); ++n)
            if (PyList_Append(last.get(), items[n].object.get()) < 0) throw Failed{};
        raise(Ref::owned(PyObject_CallFunction(rule("refused").get(), "y#O", &code, Py_ssize_t(1), last.get())));
    }

    PyObject* data() {
        for (;;) {
            if (content.size() - at <= ahead && (!ended || at == content.size())) read_more(1);
            const unsigned char code = *take(1);
            switch (code) {
                case '.': return pop().object.release();
                case 'K': integer(i64(number(1))); break;
                case 'M': integer(i64(number(2))); break;
                case 'J': integer(std::int32_t(number(4))); break;
                case 0x8a: long_integer(); break;
                case 'G': real(); break;
                case 0x8c: text(1); break;
                case 'X': text(4); break;
                case 'N': push(Ref::to(Py_None)); break;
                case 0x88: push(Ref::to(Py_True)); break;
                case 0x89: push(Ref::to(Py_False)); break;
                case 'h': get(number(1)); break;
                case 'j': get(number(4)); break;
                case 0x94: put(memo.size()); break;
                case 'q': put(number(1)); break;
                case 'r': put(number(4)); break;
                case '(': marks.push_back(items.size()); break;
                case ']': begin_list(); break;
                case '}': push(Ref::owned(PyDict_New())); break;
                case 'e': extend(marked()); break;
                case 'a': top(), extend(items.size() - 1); break;
                case 'u': set_items(marked()); break;
                case 's':
                    if (items.size() - base() < 2) damaged(PyExc_IndexError, "no key and value");
                    set_items(items.size() - 2);
                    break;
                case 't': gather(marked()); break;
                case ')': gather_last(0); break;
                case 0x85: gather_last(1); break;
                case 0x86: gather_last(2); break;
                case 0x87: gather_last(3); break;
                case 0x95: take(8); break;
                default: refuse(code);
            }
        }
    }
};

PyObject* data(PyObject*, PyObject* const* given, Py_ssize_t number) {
    if (number != 2) {
        PyErr_SetString(PyExc_TypeError, "data(pieces, rules)");
        return nullptr;
    }
    try {
        return Parser(given[0], given[1]).data();
    } catch (const Failed&) {
        return nullptr;
    } catch (const std::exception&) {  // there is no more memory, or no more may be used
        return PyErr_NoMemory();
    }
}

PyMethodDef methods[] = {
    {"data", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(data)), METH_FASTCALL,
     "Return what Parser.data does; `pieces` returns the next bytes of the file, `rules` is pickles.py."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "The compiled twin of pickles.Parser.", -1, methods, nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
    if (const char* pure = std::getenv("MEMFIT_PURE_PYTHON"); pure && *pure) {
        PyErr_SetString(PyExc_ImportError, "MEMFIT_PURE_PYTHON is set");
        return nullptr;
    }
    return PyModule_Create(&definition);
}
