// Items shared by the threads of OpenMP.
//
// cpu.cpp includes this in its own namespace.

// That some thread of a parallel region has had no memory. An exception that left the region would end the process.
class Failed {
    std::atomic<bool> is_so{false};

  public:
    operator bool() const { return is_so.load(std::memory_order_relaxed); }
    template <class Work> void within(Work work) {
        try { work(); } catch (const std::exception&) { is_so = true; }
    }
    void rethrow() const { if (is_so) throw std::bad_alloc(); }
};

// item(buffer, i) for every i below count, by several threads if there is much to do, each in a buffer of its own. One thread
// is not asked through OpenMP, which would take a tenth of what a small product does.
template <class Make, class Item> inline void over(int64_t count, bool is_much, Make make, Item item) {
    if (!is_much || count < 2) {
        auto buffer = make();
        for (int64_t i = 0; i < count; i++) item(buffer, i);
        return;
    }
    Failed failed;
#pragma omp parallel
    {
        decltype(make()) buffer;
        failed.within([&] { buffer = make(); });
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < count; i++)
            if (!failed) item(buffer, i);
    }
    failed.rethrow();
}
