# Writes a C++ file with the texts of CUDA sources: cmake -DOUTPUT=FILE -DLIST=FILE -P embed_sources.cmake
# LIST has one line "name|path" for each text. Headers have the names of their #include lines.
file(STRINGS ${LIST} lines)
set(texts "")
set(entries "")
set(count 0)
foreach(line IN LISTS lines)
  string(FIND "${line}" "|" split)
  string(SUBSTRING "${line}" 0 ${split} name)
  math(EXPR split "${split} + 1")
  string(SUBSTRING "${line}" ${split} -1 path)
  file(READ "${path}" text)
  string(APPEND texts "const char text${count}[] = R\"cuda(${text})cuda\";\n")
  string(APPEND entries "    {\"${name}\", text${count}},\n")
  math(EXPR count "${count} + 1")
endforeach()
file(WRITE ${OUTPUT}.draft
     "#include \"kernel_runtime/native/sources.hpp\"\n\nnamespace kernel_runtime::cuda {\nnamespace {\n\n${texts}\n}  // namespace\n\n"
     "const Source kSources[] = {\n${entries}};\nconst size_t kSourceCount = ${count};\n\n"
     "}  // namespace kernel_runtime::cuda\n")
file(RENAME ${OUTPUT}.draft ${OUTPUT})
