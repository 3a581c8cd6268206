// The op torchtether::linear in compiled graphs, without Python.
//
// cpu.cpp includes this in its own namespace.

struct Remembered {
    const Layout* L;
    size_t parts;                // that the op is given
    std::vector<int64_t> order;  // which of them the kernels take
};
std::unordered_map<std::string, Remembered> remembered;  // by what the op is told of the Weight
std::shared_mutex remembering;

// torchtether::linear(Tensor x, Tensor? bias, Tensor[] parts, str weight) -> Tensor
void linear_in_graph(uint64_t* stack, uint64_t, uint64_t) {
    const Remembered* found = nullptr;
    {
        std::shared_lock<std::shared_mutex> lock(remembering);
        const auto at = remembered.find(text_of(stack[3]));
        if (at != remembered.end()) found = &at->second;  // which stays there
    }
    const std::vector<uint64_t> parts = items_of(stack[2]);
    uint64_t made = 0, taken[5];
    if (found && parts.size() == found->parts && found->L->entries && found->L->entries->linear_of_handles) {
        const intptr_t count = found->order.size();
        for (intptr_t i = 0; i < count; i++) taken[i] = parts[found->order[i]];
        const void* bias = stack[1] ? (const void*)*(const uint64_t*)stack[1] : nullptr;
        made = found->L->entries->linear_of_handles(*found->L, (const void*)stack[0], bias, taken, count);
    }
    if (!made) return pass_on("torchtether::any_linear", stack);
    drop_tensor(stack[0]), drop_optional_tensor(stack[1]), drop_text(stack[3]);
    for (const uint64_t part : parts) drop_tensor(part);
    dispatcher.drop_list((void*)stack[2]);
    stack[0] = made;
}
