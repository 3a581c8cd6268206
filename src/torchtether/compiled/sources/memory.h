// Arrays of elements. The linker could keep, for all levels, a function of the standard library that was compiled with the
// instructions of one level: hence the kernels use only functions of it that are inlined.
//
// kernels.cpp includes this in its own namespace.

template <class T> class Array {
    T* start = nullptr;

  public:
    Array() = default;
    explicit Array(int64_t count, const T& value = T{}) { resize(count, value); }
    Array(const Array&) = delete;
    Array(Array&& other) : start(other.start) { other.start = nullptr; }
    Array& operator=(Array&& other) {
        T* mine = start;
        start = other.start, other.start = mine;
        return *this;
    }
    ~Array() { free(start); }

    static Array unset(int64_t count) {  // whose elements have no values yet
        const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
        Array made;
        made.start = (T*)aligned_alloc(64, bytes ? bytes : 64);
        if (!made.start) throw std::bad_alloc();
        return made;
    }

    void resize(int64_t count, const T& value = T{}) {  // only of an empty one
        *this = unset(count);
        for (int64_t i = 0; i < count; i++) start[i] = value;
    }

    T* data() { return start; }
    const T* data() const { return start; }
    T& operator[](int64_t i) { return start[i]; }
    const T& operator[](int64_t i) const { return start[i]; }
};

typedef Array<float> Buffer;
