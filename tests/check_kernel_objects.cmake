# Fails unless each of OBJECTS defines one external symbol, the entry function of its kernels.
list(LENGTH OBJECTS count)
if(count EQUAL 0)
  message(FATAL_ERROR "no kernel objects given")
endif()
foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND ${NM} -C --extern-only --defined-only ${object}
                  OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(STRIP "${symbols}" symbols)
  if(NOT symbols MATCHES "^[0-9a-f]+ T mha::cpu::[a-z0-9_]+_kernels\\(\\)$")
    message(FATAL_ERROR "${object} defines more than its entry function:\n${symbols}")
  endif()
  message("${object}: ${symbols}")
endforeach()
