// Sharing work among the threads of torch.
//
// kernels.cpp includes this in its own namespace.

// Whether a thread failed to allocate memory. An exception that left the thread would end the process.
class Failed {
    std::atomic<bool> is_so{false};

  public:
    operator bool() const { return is_so.load(std::memory_order_relaxed); }
    template <class Work> void within(Work work) {
        try { work(); } catch (const std::exception&) { is_so = true; }
    }
    void rethrow() const { if (is_so) throw std::bad_alloc(); }
};

// The items below `count`, which threads take `step` at a time: a thread whose core is busy takes fewer.
class Shares {
    std::atomic<int64_t> next{0};
    const int64_t count, step;

  public:
    Shares(int64_t count, int64_t step) : count(count), step(step) {}
    bool take(int64_t* first, int64_t* end) {
        *first = next.fetch_add(step, std::memory_order_relaxed);
        *end = *first + step < count ? *first + step : count;
        return *first < count;
    }
};

// Calls work(shares): not in line, else the compiler makes a copy for each of the two calls below.
template <class Work> __attribute__((noinline)) void take(const Work& work, Shares& shares) { work(shares); }

// Calls work(shares) in several threads if there is much to do, else directly: a call through torch would add a tenth to the
// time of a small product.
template <class Work> inline void in_threads(int64_t count, int64_t step, bool is_much, Work work) {
    uint32_t threads = 1;
    if (is_much && count > step && parallel_for) count_threads(&threads);
    if (threads < 2) {
        Shares all(count, count);
        return take(work, all);
    }
    struct Shared {
        Shares shares;
        Failed failed;
        Work* work;
    } shared{{count, step}, {}, &work};
    const int64_t most = (count + step - 1) / step;
    const auto run = [](int64_t begin, int64_t end, void* with) {
        Shared& shared = *(Shared*)with;
        for (; begin < end; begin++) shared.failed.within([&] { take(*shared.work, shared.shares); });
    };
    if (parallel_for(0, threads < most ? threads : most, 1, run, &shared)) throw std::bad_alloc();
    shared.failed.rethrow();
}

// How many of `count` items a thread takes at once, an eighth of its part: taking costs time, too.
inline int64_t share_of(int64_t count, bool is_much) {
    uint32_t threads = 1;
    if (is_much && parallel_for) count_threads(&threads);
    return (count + 8 * threads - 1) / (8 * threads);
}

// Calls item(buffer, i) for every i below count, in several threads if there is much to do, each with a buffer of its own.
template <class Make, class Item> inline void over(int64_t count, bool is_much, Make make, Item item) {
    in_threads(count, share_of(count, is_much), is_much, [&](Shares& shares) {
        auto buffer = make();
        for (int64_t i, end; shares.take(&i, &end);)
            for (; i < end; i++) item(buffer, i);
    });
}
