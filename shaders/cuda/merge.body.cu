  mla::merge((const float*)part, part_lse, part_lse_shape[2], part_lse_shape[1],
             (mla::Bits*)out, lse);
