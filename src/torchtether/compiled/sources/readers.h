// Threads that read files: each range of bytes in pieces, so that several threads share one read, without the GIL.
//
// Python's own threads wait for each other's turn after every piece: 2.1 GB for a GPU took them 1.2 times as long.

struct Read {
    int descriptor;
    char* to;
    int64_t at, bytes, begun, left;  // `begun` bytes are read or being read, `left` are not read yet
    bool is_whole;
};

inline bool read_whole(int descriptor, char* to, int64_t at, int64_t bytes) {
    while (bytes > 0) {
        const ssize_t got = pread(descriptor, to, (size_t)bytes, (off_t)at);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        to += got, at += got, bytes -= got;
    }
    return true;
}

class Readers {
    std::mutex lock;
    std::condition_variable is_more, is_read;
    std::map<int64_t, Read> reads;  // by their numbers
    std::deque<Read*> waiting;      // of which some bytes are not begun
    std::vector<std::thread> threads;
    const int64_t piece;
    int64_t last = 0;
    bool is_closing = false;

    void work() {
        std::unique_lock<std::mutex> held(lock);
        for (;;) {
            is_more.wait(held, [&] { return is_closing || !waiting.empty(); });
            if (waiting.empty()) return;
            Read& read = *waiting.front();
            const int64_t start = read.begun, rest = read.bytes - start, bytes = rest < piece ? rest : piece;
            read.begun += bytes;
            if (bytes == rest) waiting.pop_front();
            held.unlock();
            const bool is_whole = read_whole(read.descriptor, read.to + start, read.at + start, bytes);
            held.lock();
            read.is_whole = read.is_whole && is_whole;
            read.left -= bytes;
            if (!read.left) is_read.notify_all();
        }
    }

  public:
    Readers(int64_t count, int64_t piece) : piece(piece) {
        try {
            while ((int64_t)threads.size() < count) threads.emplace_back([this] { work(); });
        } catch (const std::exception&) {  // no more threads; some are enough
            if (threads.empty()) throw std::bad_alloc();
        }
    }
    ~Readers() {
        {
            const std::lock_guard<std::mutex> held(lock);
            is_closing = true;
        }
        is_more.notify_all();
        for (std::thread& thread : threads) thread.join();
    }
    int64_t start(int descriptor, char* to, int64_t at, int64_t bytes) {
        const std::lock_guard<std::mutex> held(lock);
        Read& read = reads[++last] = {descriptor, to, at, bytes, 0, bytes, true};
        waiting.push_back(&read);
        is_more.notify_all();
        return last;
    }
    bool finish(int64_t number) {
        std::unique_lock<std::mutex> held(lock);
        const auto found = reads.find(number);
        if (found == reads.end()) return false;
        is_read.wait(held, [&] { return found->second.left == 0; });
        const bool is_whole = found->second.is_whole;
        reads.erase(found);
        return is_whole;
    }
};

inline Readers* readers_in(PyObject* capsule) { return (Readers*)PyCapsule_GetPointer(capsule, "readers"); }

// (threads, the most bytes that one of them reads at once): returns a capsule; when it is freed, all reads have ended.
PyObject* open_readers(PyObject*, PyObject* const* given, Py_ssize_t count) {
    int64_t threads = 0, piece = 0;
    if (count != 2) return refuse("open_readers(threads, piece)");
    from(given[0], &threads), from(given[1], &piece);
    if (PyErr_Occurred()) return nullptr;
    if (threads < 1 || piece < 1) return refuse("open_readers: no threads, or pieces of no bytes");
    return or_memory_error([&] {
        return PyCapsule_New(new Readers(threads, piece), "readers", [](PyObject* capsule) {
            Readers* mine = readers_in(capsule);
            aside(true, [&] { delete mine; });
        });
    });
}

// (readers, descriptor, address, byte of the file, bytes): returns the number of a read, which threads begin at once. The
// memory must stay until `finish_read`, or until the readers are freed.
PyObject* start_read(PyObject*, PyObject* const* given, Py_ssize_t count) {
    int descriptor = -1;
    char* to = nullptr;
    int64_t at = 0, bytes = 0;
    if (count != 5) return refuse("start_read(readers, descriptor, address, at, bytes)");
    Readers* readers = readers_in(given[0]);
    if (!readers) return nullptr;
    from(given[1], &descriptor), from(given[2], &to), from(given[3], &at), from(given[4], &bytes);
    if (PyErr_Occurred()) return nullptr;
    if (!to || at < 0 || bytes < 1) return refuse("start_read: no memory, or no bytes");
    return or_memory_error([&] { return PyLong_FromLongLong(readers->start(descriptor, to, at, bytes)); });
}

// (readers, the number of a read): waits for its end, and returns whether it read all bytes; once for each read.
PyObject* finish_read(PyObject*, PyObject* const* given, Py_ssize_t count) {
    int64_t number = 0;
    if (count != 2) return refuse("finish_read(readers, number)");
    Readers* readers = readers_in(given[0]);
    if (!readers) return nullptr;
    from(given[1], &number);
    if (PyErr_Occurred()) return nullptr;
    return PyBool_FromLong(aside(true, [&] { return readers->finish(number); }));
}
